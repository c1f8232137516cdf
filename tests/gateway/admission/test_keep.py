"""When a client leaves: a plain request ends at once, one that can be resumed lives on for its time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.gateway import Gateway, open_gateway
from services.gateway.timings import Timings
from shared.queue import connect
from shared.queue.keys import Keys
from tests.support.gateway.neighbours import Played
from tests.support.gateway.stage import MODEL, Stage, answer_slowly, until_ready
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS
from tests.support.waiting import until_async

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


async def at_once(rid: str, index: int) -> None:
    pass


@contextlib.asynccontextmanager
async def reading(gateway: Gateway, path: str = "", **headers: str) -> AsyncIterator[str]:
    """A client that reads a stream; it leaves at the end of the block. Gives the request's name."""
    async with plain_client(gateway.url, timeout=60) as client:
        request = client.build_request("GET", path) if path else client.build_request(
            "POST", CHAT, json=BODY, headers=headers
        )  # fmt: skip
        reply = await client.send(request, stream=True)
        assert reply.status_code == 200
        parts = reply.aiter_text()  # to drop it would hang up
        await anext(parts)
        yield reply.headers["x-request-id"]
        await reply.aclose()


async def field(stage: Stage, rid: str, name: str) -> int:
    redis = connect(stage.settings.redis_url)
    value = await redis.hget(Keys(MODEL).request(rid), name)
    await redis.aclose()
    return int(value or 0)


async def test_a_plain_request_is_cancelled_at_once(stage: Stage) -> None:
    answer_slowly(stage)
    async with reading(stage.gateway) as rid:
        played = await stage.scheduler.taken(rid)
        assert played.spec.keep_ms == 0
    await asyncio.wait_for(played.ended.wait(), 60)
    assert played.cancelled


@pytest.mark.parametrize(
    ("headers", "kept_s"),
    [
        ({"Idempotency-Key": "a"}, 30),
        ({"X-Tessera-Resume": "600"}, 600),
        ({"Idempotency-Key": "b", "X-Tessera-Resume": "45"}, 45),
    ],
)
async def test_a_resumable_request_waits_for_its_client(
    stage: Stage, headers: dict[str, str], kept_s: int
) -> None:
    answer_slowly(stage)
    async with reading(stage.gateway, **headers) as rid:
        played = await stage.scheduler.taken(rid)
        assert played.spec.keep_ms == kept_s * 1000
        arrived = await field(stage, rid, "arrived_ms")
        before = await field(stage, rid, "follow_until_ms")
        assert before - arrived >= kept_s * 1000
        await asyncio.sleep(0.3)
    async with asyncio.timeout(60):  # its time begins when the client has left
        while await field(stage, rid, "follow_until_ms") <= before:
            await asyncio.sleep(0.05)
    assert not played.cancelled
    async with reading(stage.gateway, f"/v1/requests/{rid}/stream") as again:
        assert again == rid
    assert not played.cancelled


@pytest.mark.parametrize("value", ["601", "-1", "soon", "1.5", "9" * 30])
async def test_how_long_must_be_a_number_of_seconds(stage: Stage, value: str) -> None:
    reply = await stage.http.post(CHAT, json=BODY, headers={"X-Tessera-Resume": value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "X-Tessera-Resume" and "600" in error["message"]


async def test_zero_seconds_make_a_key_without_a_wait(stage: Stage) -> None:
    answer_slowly(stage)
    headers = {"Idempotency-Key": "a", "X-Tessera-Resume": "0"}
    async with reading(stage.gateway, **headers) as rid:
        played = await stage.scheduler.taken(rid)
    await asyncio.wait_for(played.ended.wait(), 60)
    assert played.cancelled


@pytest.mark.parametrize("where", ["here", "there"])
async def test_of_two_followers_only_the_last_ones_leaving_counts(
    stage: Stage, other: Gateway, where: str
) -> None:
    answer_slowly(stage)
    second = stage.gateway if where == "here" else other
    played: Played
    async with contextlib.AsyncExitStack() as stack:
        async with reading(stage.gateway) as rid:
            played = await stage.scheduler.taken(rid)
            await stack.enter_async_context(reading(second, f"/v1/requests/{rid}/stream"))
        await until_async(lambda: len(stage.gateway.follower) == (where == "here"))
        await asyncio.sleep(0.3)
        assert not played.cancelled and not played.ended.is_set()
    # Who has resumed once may do so again: it lives on for half a minute.
    assert not await field(stage, rid, "cancel")


@pytest.mark.parametrize("timings", [Timings(renew_s=0.0)])
async def test_followed_requests_are_reported_repeatedly(stage: Stage) -> None:
    answer_slowly(stage)
    async with reading(stage.gateway) as rid:
        await stage.scheduler.taken(rid)
        first = await field(stage, rid, "follow_until_ms")
        async with asyncio.timeout(60):
            while await field(stage, rid, "follow_until_ms") == first:
                await asyncio.sleep(0.1)


async def read(client: httpx.AsyncClient, url: str, begun: asyncio.Event) -> str:
    """All of a stream; sets the event with its first part."""
    text = ""
    async with client.stream("POST", url, json=BODY, headers=ASK_FOR_IDS) as reply:
        async for part in reply.aiter_text():
            text += part
            begun.set()
    return text


async def test_a_drained_gateway_leaves_its_requests_to_others(stage: Stage) -> None:
    answer_slowly(stage)
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.5})
    async with plain_client(timeout=60) as client:
        async with open_gateway(settings) as gateway:
            async with plain_client(gateway.url) as probe:
                await until_ready(probe)
            begun = asyncio.Event()
            streaming = asyncio.create_task(read(client, f"{gateway.url}{CHAT}", begun))
            whole = {**BODY, "stream": False}
            key = {"Idempotency-Key": "k"}
            waiting = asyncio.create_task(
                client.post(f"{gateway.url}{CHAT}", json=whole | {"max_tokens": 300}, headers=key)
            )
            await begun.wait()
            await until_async(lambda: len(stage.scheduler.played) == 2)
        text, refused = await streaming, await waiting
    assert '"code": "shutting_down"' in text.split("\n\n")[-2]
    assert refused.status_code == 503
    stage.scheduler.step = at_once
    assert not any(played.cancelled for played in stage.scheduler.played.values())
    last = [line[4:] for line in text.split("\n") if line.startswith("id: ")][-1]
    rid = last.partition("/")[0]
    rest = await stage.http.get(f"/v1/requests/{rid}/stream?after={last}")
    assert "word" in rest.text and rest.text.endswith("data: [DONE]\n\n")
    done = await stage.http.post(CHAT, json=whole | {"max_tokens": 300}, headers=key)
    assert done.json()["usage"]["completion_tokens"] == 300
