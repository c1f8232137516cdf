"""kill -9 of a gateway: what it had accepted goes on, and its clients go on elsewhere."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway.process import GatewayProcess, beside
from tests.support.gateway.stage import ANSWER, Stage
from tests.support.network.sse import ASK_FOR_IDS, events, merged, with_ids

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "n": 2, "logprobs": True}


@pytest.fixture
async def doomed(stage: Stage) -> AsyncIterator[GatewayProcess]:
    async with beside(stage) as started:
        yield started


async def test_its_streams_go_on_at_another(stage: Stage, doomed: GatewayProcess) -> None:
    process, client = doomed
    go = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        if index == 4:
            await go.wait()

    stage.scheduler.step = step
    async with client.stream(
        "POST", CHAT, json=BODY | {"stream": True}, headers=ASK_FOR_IDS
    ) as reply:
        parts, text = reply.aiter_text(), ""
        while "/4.4\n" not in text:
            text += await anext(parts)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            while True:
                text += await anext(parts)
    go.set()
    seen = with_ids(text)
    last = seen[-1][0]
    rest = await stage.http.get(f"/v1/requests/{last.partition('/')[0]}/stream?after={last}")
    whole = merged([chunk for _, chunk in seen] + events(rest.text))
    assert [whole["choices"][c]["delta"]["content"] for c in range(2)] == [ANSWER, ANSWER]
    assert len(stage.scheduler.played) == 1


async def test_its_keys_are_answered_by_another(stage: Stage, doomed: GatewayProcess) -> None:
    process, client = doomed
    key = {"Idempotency-Key": "k"}
    go = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        await go.wait()

    stage.scheduler.step = step
    asked = asyncio.create_task(client.post(CHAT, json=BODY, headers=key))
    played = await stage.scheduler.taken()
    process.send_signal(signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await asked
    again = asyncio.create_task(stage.http.post(CHAT, json=BODY, headers=key))
    await asyncio.sleep(0.1)
    go.set()
    reply = (await again).json()
    assert reply["id"] == f"chatcmpl-{played.spec.request_id}"
    assert [choice["message"]["content"] for choice in reply["choices"]] == [ANSWER, ANSWER]
    assert len(stage.scheduler.played) == 1
