"""Which requests may find each other's computed prefixes: the salt that goes into the queue with each."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import CompleteRequest, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import Stage, open_stage

KEYS = {"api_key": "ann, bob"}


async def salt(stage: Stage, key: str = "", **body: Any) -> bytes:
    """That of a request as it stands in the queue."""
    if key:
        stage.http.headers["authorization"] = f"Bearer {key}"
    reply = await stage.chat(**body)
    assert reply.status_code == 200, reply.text
    return stage.scheduler.played[reply.headers["x-request-id"]].spec.cache_salt


async def test_without_keys_all_share(stage: Stage) -> None:
    assert await salt(stage) == await salt(stage, user="ann") == await salt(stage, "any") == b""
    own = await salt(stage, cache_salt="team")
    assert own == await salt(stage, user="ann", cache_salt="team")
    assert own not in (b"", await salt(stage, cache_salt="other team"))


async def test_keys_share_nothing_whatever_salt_they_name(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, **KEYS) as stage:
        ann = await salt(stage, "ann")
        assert ann and b"ann" not in ann
        assert await salt(stage, "ann", user="somebody") == ann
        assert await salt(stage, "bob") not in (b"", ann)
        team = [await salt(stage, key, cache_salt="team") for key in ("ann", "bob", "ann")]
        assert team[0] == team[2]
        assert len({ann, *team}) == 3


async def test_keys_share_prefixes_with_share_prefix_cache(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    told = {**KEYS, "share_prefix_cache": True}
    async with open_stage(redis_url, model_folder, tokenizer, **told) as stage:
        assert await salt(stage, "ann") == await salt(stage, "bob") == b""
        own = await salt(stage, "ann", cache_salt="team")
        assert own == await salt(stage, "bob", cache_salt="team") != b""


@pytest.mark.parametrize("wrong", ["", 7, ["x"], "x" * 513])
async def test_a_salt_is_a_text_that_is_not_empty(stage: Stage, wrong: object) -> None:
    for path, more in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "Hi"}),
    ):
        reply = await stage.http.post(f"/v1/{path}", json={**more, "cache_salt": wrong})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "cache_salt"


async def test_grpc_has_the_same_salt(stage: Stage) -> None:
    async with open_channel(stage.gateway.grpc_address) as channel:
        options = GenerationOptions(max_tokens=1, cache_salt="team")
        call = ChatServiceStub(channel).Complete(CompleteRequest(text="Hi", options=options))
        events = [event async for event in call]
        rid = events[0].accepted.request_id
        assert stage.scheduler.played[rid].spec.cache_salt == await salt(stage, cache_salt="team")
        options.cache_salt = ""
        with pytest.raises(Exception, match="cache_salt must not be empty"):
            async for _ in ChatServiceStub(channel).Complete(
                CompleteRequest(text="Hi", options=options)
            ):
                pass
