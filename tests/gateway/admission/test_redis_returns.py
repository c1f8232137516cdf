"""Redis dies and comes back: nobody hangs, streams pause and go on, what it lost is put back."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.gateway import open_gateway
from services.gateway.timings import Timings
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.queue.log_event import Origin
from tests.support.gateway.stage import ANSWER, Stage, open_stage, pause_at, until_ready
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, events, texts_of

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "What is there?"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def forgetful_redis(short_tmp: Path) -> Iterator[EmbeddedRedis]:
    """A Redis that has lost everything when it comes back."""
    with EmbeddedRedis(short_tmp / "redis", short_tmp / "r.sock", persistent=False) as server:
        yield server


@pytest.fixture
async def kept(
    private_redis: EmbeddedRedis, model_folder: Path, tokenizer: Tokenizer
) -> AsyncIterator[Stage]:
    async with open_stage(private_redis.url, model_folder, tokenizer) as stage:
        yield stage


async def test_without_redis_new_requests_are_refused_at_once(
    kept: Stage, private_redis: EmbeddedRedis
) -> None:
    rid = (await kept.chat()).headers["x-request-id"]
    private_redis.kill()
    for _ in range(2):
        reply = await asyncio.wait_for(kept.chat(), 60)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "redis_unavailable"
        assert int(reply.headers["retry-after"]) >= 1
    for path in (f"/v1/requests/{rid}", f"/v1/requests/{rid}/stream"):
        assert (await kept.http.get(path)).status_code == 503
    assert (await kept.http.get("/health/live")).status_code == 200
    private_redis.start()
    async with asyncio.timeout(60):
        while (reply := await kept.chat()).status_code != 200:
            await asyncio.sleep(0.1)
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER


async def test_a_frozen_redis_blocks_no_client(kept: Stage, private_redis: EmbeddedRedis) -> None:
    async with (
        open_gateway(kept.settings, timings=Timings(reserve_s=0.3)) as gateway,
        plain_client(gateway.url, timeout=60) as client,
    ):
        await until_ready(client)
        os.kill(private_redis.pid, signal.SIGSTOP)
        try:
            reply = await client.post(CHAT, json=BODY)
        finally:
            os.kill(private_redis.pid, signal.SIGCONT)
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        # It is not the connection that gave up.
        assert "Redis does not answer" in reply.json()["error"]["message"]
        await gateway.admission.settled()
    assert (await kept.chat()).status_code == 200
    assert await kept.scheduler.queue.depth() == (0, 0)


async def test_a_running_stream_pauses_and_goes_on(
    kept: Stage, private_redis: EmbeddedRedis
) -> None:
    go = pause_at(kept, 5)
    body = {**BODY, "stream": True, "logprobs": True}
    async with kept.http.stream("POST", CHAT, json=body, headers=ASK_FOR_IDS) as reply:
        parts = reply.aiter_text()
        text = ""
        while "/5\n" not in text:
            text += await anext(parts)
        private_redis.kill()
        go.set()
        await asyncio.sleep(0.3)
        private_redis.start()
        text += "".join([part async for part in parts])
    assert texts_of(events(text)) == {0: ANSWER}


async def test_what_redis_lost_is_put_back_by_the_gateway(
    forgetful_redis: EmbeddedRedis, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(forgetful_redis.url, model_folder, tokenizer) as stage:
        go = pause_at(stage, 5)
        stage.scheduler.origin = Origin(numerics="n1", is_exact=False)
        running = {**BODY, "n": 2, "logprobs": True, "prompt_logprobs": 1, "stream": True}
        async with stage.http.stream("POST", CHAT, json=running, headers=ASK_FOR_IDS) as reply:
            parts = reply.aiter_text()
            text = ""
            while text.count("/5.5\n") == 0:
                text += await anext(parts)
            stage.scheduler.taking = False
            waiting = asyncio.create_task(stage.http.post(CHAT, json=BODY))
            await stage.admitted(2)
            forgetful_redis.kill()
            forgetful_redis.start()
            stage.scheduler.origin = Origin()  # what it has said once the gateway knows
            go.set()
            stage.scheduler.taking = True
            text += "".join([part async for part in parts])
        assert texts_of(events(text)) == {0: ANSWER, 1: ANSWER}
        rid = reply.headers["x-request-id"]
        state = (await stage.http.get(f"/v1/requests/{rid}")).json()
        assert state["exact"] is False
        whole = (await waiting).json()
        assert whole["choices"][0]["message"]["content"] == ANSWER
        page = (await stage.http.get("/metrics")).text
        assert (
            'tessera_restores_total{engine="0",model_name="tiny-vl",result="restored"} 2.0' in page
        )


async def test_an_admission_without_an_answer_is_repeated(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, lost = stage.gateway.admission._queue, list[Any]()
    admit = queue.admit

    async def deaf(*args: Any, **named: Any) -> int:
        arrived = await admit(*args, **named)
        if len(lost) < 2:
            lost.append(arrived)
            raise Unavailable("REDIS_UNAVAILABLE", "the connection broke")
        return arrived

    monkeypatch.setattr(queue, "admit", deaf)
    reply = await stage.chat()
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
    assert len(lost) == 2 and len(stage.scheduler.played) == 1


async def test_a_redis_that_lost_other_tokens_ends_the_stream(
    forgetful_redis: EmbeddedRedis, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """The owner is alive and says something else: never a silent mix."""
    async with open_stage(forgetful_redis.url, model_folder, tokenizer) as stage:
        pause_at(stage, 5)
        body = {**BODY, "stream": True}
        async with stage.http.stream("POST", CHAT, json=body, headers=ASK_FOR_IDS) as reply:
            parts = reply.aiter_text()
            text = ""
            while "/5\n" not in text:
                text += await anext(parts)
            (spec,) = [played.spec for played in stage.scheduler.played.values()]
            queue = stage.scheduler.queue
            await queue._connection.call(
                "SET", queue._keys.log(spec.request_id, 0), b"\7\0\0\0" * 9
            )
            await queue._connection.call("CLIENT", "KILL", "TYPE", "pubsub")
            text += "".join([part async for part in parts])
    error = json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]
    assert error["code"] == "stream_diverged"
