"""Timelines of requests that were refused: where they ended and why, for their callers alone, and few of a flood."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.launcher.why import waterfall
from shared.errors import InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.stores.timeline_store import MOST_REFUSALS, TimelineStore
from shared.telemetry.timeline import Refusal, Timelines
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import MODEL, Stage, open_stage

SECRET = "what nobody else may read"


async def refusal(stage: Stage, reply: Any, **more: Any) -> dict[str, Any]:
    rid = reply.headers["x-tessera-request-id"]
    found = await stage.http.get(f"/v1/requests/{rid}/timeline", **more)
    assert found.status_code == 200, found.text
    told: dict[str, Any] = found.json()
    assert (told["state"], told["request_id"], told["model"]) == ("refused", rid, MODEL)
    assert SECRET not in found.text
    return told


def end_of(told: dict[str, Any]) -> dict[str, Any]:
    (end,) = (s["attributes"] for s in told["spans"] if s["name"] == "refused")
    found: dict[str, Any] = end
    return found


async def test_each_kind_of_refusal_says_where_and_why(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(
        redis_url, model_folder, tokenizer, max_waiting_requests=1, max_body_bytes=1 << 16
    ) as stage:
        wrong = end_of(await refusal(stage, await stage.chat(temperature=9)))
        assert (wrong["status"], wrong["error"], wrong["where"]) == (400, "INVALID_VALUE", "read")
        assert wrong["field"] == "temperature" and "why" not in wrong
        large = await stage.http.post("/v1/completions", json={"prompt": SECRET * 5000})
        assert large.status_code == 413
        assert end_of(await refusal(stage, large))["where"] == "read"

        stage.preprocess.failure = InvalidRequest("BAD_IMAGE", SECRET, field="messages")
        told = await refusal(stage, await stage.chat())
        assert end_of(told)["error"] == "BAD_IMAGE" and end_of(told)["where"] == "prepare"
        assert {"read", "reserve", "prepare"} <= {span["name"] for span in told["spans"]}
        assert "in preparing the prompt: 400 bad_image of messages" in told["text"]
        assert told["text"] in "\n".join(waterfall(told, 80))

        stage.preprocess.failure = None
        stage.preprocess.gate.clear()
        waiting = asyncio.create_task(stage.chat())
        while not stage.preprocess.seen[1:]:
            await asyncio.sleep(0.01)
        full = await stage.chat()
        assert full.status_code == 429
        told = await refusal(stage, full)
        assert end_of(told)["where"] == "reserve" and "retry_after_s" in end_of(told)
        assert f"429 {end_of(told)['error'].lower()}" in told["text"]
        waiting.cancel()  # the client leaves
        rid = stage.preprocess.seen[-1].request_id
        async with asyncio.timeout(30):
            while (
                found := await stage.http.get(f"/v1/requests/{rid}/timeline")
            ).status_code != 200:
                await asyncio.sleep(0.05)
        assert "in preparing the prompt: its client left" in found.json()["text"]
        stage.preprocess.gate.set()


async def test_refusals_are_for_their_callers(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    keys = {"api_key": "mine,other"}
    async with open_stage(redis_url, model_folder, tokenizer, **keys) as stage:
        body = {"prompt": SECRET, "temperature": 9}
        mine = {"Authorization": "Bearer mine"}
        reply = await stage.http.post("/v1/completions", json=body, headers=mine)
        await refusal(stage, reply, headers=mine)
        path = f"/v1/requests/{reply.headers['x-tessera-request-id']}/timeline"
        other = {"Authorization": "Bearer other"}
        assert (await stage.http.get(path)).status_code == 401
        assert (await stage.http.get(path, headers=other)).status_code == 404
        # Whoever has no key leaves nothing.
        reply = await stage.http.post("/v1/completions", json=body)
        assert reply.status_code == 401
        path = f"/v1/requests/{reply.headers['x-tessera-request-id']}/timeline"
        assert (await stage.http.get(path, headers=mine)).status_code == 404


async def test_without_keys_a_user_finds_what_was_refused_before_and_after_it_was_read(
    stage: Stage,
) -> None:
    stage.preprocess.failure = InvalidRequest("BAD_IMAGE", SECRET)
    for body in ({"user": "ada"}, {"user": "ada", "temperature": 9}):
        reply = await stage.chat(**body)
        assert reply.status_code == 400
        await refusal(stage, reply, params={"user": "ada"})
    reply = await stage.chat(user="ada")
    path = f"/v1/requests/{reply.headers['x-tessera-request-id']}/timeline"
    assert (await stage.http.get(path, params={"user": "eve"})).status_code == 404


async def test_refusals_over_grpc_carry_their_request_id(stage: Stage) -> None:
    stage.preprocess.failure = InvalidRequest("BAD_IMAGE", SECRET)
    async with open_channel(stage.gateway.grpc_address) as channel:
        message = ChatMessage(role="user", content=[ContentPart(text="hi")])
        with pytest.raises(InvalidRequest) as raised, calling("gateway"):
            async for _ in ChatServiceStub(channel).Chat(ChatRequest(messages=[message])):
                pass
        rid = raised.value.metadata["request_id"]
    told = (await stage.http.get(f"/v1/requests/{rid}/timeline")).json()
    assert end_of(told)["where"] == "prepare" and end_of(told)["path"].startswith("grpc")


async def test_a_flood_costs_little(redis_url: str) -> None:
    timelines = Timelines("gateway", "g")
    timelines.clock_us = 0.0
    for number in range(500):
        with pytest.raises(KeyError), timelines.held(f"r{number}"):
            timelines.span(f"r{number}", "read", 0.0, 1.0)
            raise KeyError
        timelines.refused(f"r{number}", "t", b"", 0.0, {"read": "reserve"}, error="QUEUE_FULL")
    taken = timelines.take_refusals()
    assert len(taken) == 64 and len(timelines) == 0
    names = [span[0] for span in json.loads(taken[0].chunk)["spans"]]
    assert names == ["read", "reserve", "refused"]
    keys = Keys("flood")
    async with connect(redis_url) as redis:
        store = TimelineStore(redis, keys)
        many = [Refusal(f"r{n:05}", "t", b"", b"{}") for n in range(MOST_REFUSALS + 30)]
        await store.add_refusals(many)
        assert len(await redis.keys(f"{keys.prefix}:refused:*")) == MOST_REFUSALS
        assert await store.read_refusal("r00029", ["t"]) is None
        assert await store.read_refusal("r00030", ["x", "t"]) is not None
        assert await store.read_refusal("r00030", ["x"]) is None
        assert 0 < await redis.ttl(keys.refused("r00030")) <= 600
