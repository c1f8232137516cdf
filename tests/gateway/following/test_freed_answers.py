"""Answers that have ended are freed by their reference counts: the process seldom collects garbage."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.gateway.api.openai.replies import ReplyWriter
from services.gateway.api.part_stream import PartStream
from services.gateway.api.responses.creation import Creation
from services.gateway.following.answer import Answer, AnswerFold
from services.gateway.http.exchange import Exchange
from shared.errors import Internal
from shared.net.channels import open_channel
from shared.text.stop_search import StopSearch, StopStrings
from tessera.gateway.v1.chat_pb2 import CompleteRequest, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import Stage
from tests.support.uncollected import alive, without_collecting

STOPS = ["never" * 100] * 4
_KINDS = (Answer, AnswerFold, StopSearch, StopStrings, ReplyWriter, PartStream, Creation, Exchange)


async def whole(stage: Stage) -> None:
    assert (await stage.chat(n=4, stop=STOPS)).status_code == 200


async def streamed(stage: Stage) -> None:
    assert (await stage.chat(n=4, stop=["square"], stream=True)).status_code == 200


async def two_prompts(stage: Stage) -> None:
    body: dict[str, Any] = {"prompt": ["one", "two"], "n": 2, "stop": STOPS, "stream": True}
    body["stream_options"] = {"include_usage": True}
    assert (await stage.http.post("/v1/completions", json=body)).status_code == 200


async def failed(stage: Stage) -> None:
    stage.scheduler.failure = Internal("BAD_LUCK", "it broke").to_failure()
    stage.scheduler.answer = lambda spec: [[5]]
    assert (await stage.chat(stop=STOPS)).status_code == 500


async def left(stage: Stage) -> None:
    body = {"prompt": "one", "stop": STOPS, "stream": True}
    async with stage.http.stream("POST", "/v1/completions", json=body) as reply:
        await anext(reply.aiter_lines())


async def over_grpc(stage: Stage) -> None:
    options = GenerationOptions(stop=STOPS, n=2)
    async with open_channel(stage.gateway.grpc_address) as channel:
        request = CompleteRequest(text="one", options=options)
        async for _ in ChatServiceStub(channel).Complete(request):
            pass


async def of_parts(stage: Stage) -> None:
    turns = [{"role": "user", "content": "one"}]
    for stream in (False, True):
        body: dict[str, Any] = {"messages": turns, "stop_sequences": STOPS, "stream": stream}
        assert (await stage.http.post("/v1/messages", json=body)).status_code == 200
        body = {"input": "one", "stop": STOPS, "stream": stream}
        assert (await stage.http.post("/v1/responses", json=body)).status_code == 200
    made = await stage.http.post("/v1/responses", json=body | {"stream": False, "background": True})
    async with asyncio.timeout(60):
        while (await stage.http.get(f"/v1/responses/{made.json()['id']}")).json()[
            "status"
        ] != "completed":
            await asyncio.sleep(0.01)


async def failed_in_parts(stage: Stage) -> None:
    stage.scheduler.failure = Internal("BAD_LUCK", "it broke").to_failure()
    stage.scheduler.answer = lambda spec: [[5]]
    for stream, status in ((False, 500), (True, 200)):
        body = {"input": "one", "stop": STOPS, "stream": stream}
        assert (await stage.http.post("/v1/responses", json=body)).status_code == status


@pytest.mark.parametrize(
    "use",
    [whole, streamed, two_prompts, failed, left, over_grpc, of_parts, failed_in_parts],
)
async def test_ended_answers_are_freed(
    stage: Stage, use: Callable[[Stage], Awaitable[None]]
) -> None:
    await use(stage)
    with without_collecting():
        for _ in range(4):
            await use(stage)
        async with asyncio.timeout(60):
            while left_over := alive(*_KINDS):
                await asyncio.sleep(0.05)
    assert not left_over
