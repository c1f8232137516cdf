"""The public gRPC door."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.gateway_stage import ANSWER, MODEL, Stage, open_stage
from tokenizers import Tokenizer

from shared import rpc
from shared.errors import InvalidRequest, NotFound, Overloaded, Unauthenticated
from tessera.common.v1.ending_pb2 import FinishReason
from tessera.gateway.v1.chat_pb2 import (
    ChatEvent,
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    GenerationOptions,
    ListModelsRequest,
    TokenIds,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub


@pytest.fixture
async def channel(stage: Stage) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(stage.gateway.grpc_address) as opened:
        yield opened


def question(text: str = "hello", **options: object) -> ChatRequest:
    message = ChatMessage(role="user", content=[ContentPart(text=text)])
    return ChatRequest(messages=[message], options=GenerationOptions(**options))  # type: ignore[arg-type]


def text_of(events: list[ChatEvent]) -> str:
    return "".join(event.delta.text for event in events)


async def test_chat_streams_events_in_order(stage: Stage, channel: grpc.aio.Channel) -> None:
    tokens = stage.says(ANSWER)
    events = [event async for event in ChatServiceStub(channel).Chat(question())]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted" and kinds[-2:] == ["finished", "usage"]
    assert set(kinds[1:-2]) == {"delta"}
    assert text_of(events) == ANSWER
    rid = events[0].accepted.request_id
    assert events[0].accepted.model == MODEL
    assert events[0].event_id == f"{rid}/0" and events[-1].event_id == f"{rid}/{len(tokens)}e"
    assert events[-2].finished.reason == FinishReason.FINISH_REASON_STOP
    assert events[-1].usage.completion_tokens == len(tokens)
    assert events[-1].usage.prompt_tokens == events[0].accepted.prompt_tokens


async def test_options_mean_what_they_mean_over_rest(
    stage: Stage, channel: grpc.aio.Channel
) -> None:
    stage.says("one STOP two")
    request = question(
        temperature=0.5, seed=9, stop=["STOP"], return_token_ids=True, max_tokens=50, top_k=-1
    )
    request.messages[0].content.add(image=b"picture")
    request.messages[0].content.add(image_url="https://example.org/a.png")
    events = [event async for event in ChatServiceStub(channel).Chat(request)]
    assert text_of(events) == "one "
    assert events[-2].finished.stop == "STOP"
    ids = [token for event in events for token in event.delta.token_ids]
    assert len(ids) == events[-1].usage.completion_tokens
    assert len(events[0].accepted.prompt_token_ids) == events[0].accepted.prompt_tokens
    parts = stage.preprocess.seen[-1].conversation.messages[0].content
    assert (parts[1].image.data, parts[2].image.url) == (b"picture", "https://example.org/a.png")
    sampling = stage.scheduler.played[events[0].accepted.request_id].spec.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 9, 0)


async def test_complete_takes_text_and_ids(stage: Stage, channel: grpc.aio.Channel) -> None:
    stub = ChatServiceStub(channel)
    for request in (
        CompleteRequest(text="The red"),
        CompleteRequest(token_ids=TokenIds(ids=stage.tokenizer.encode("The red").ids)),
    ):
        assert text_of([event async for event in stub.Complete(request)]) == ANSWER


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (ChatRequest(), InvalidRequest, "messages"),
        (question(temperature=3.0), InvalidRequest, "temperature"),
        (question(max_tokens=0), InvalidRequest, "max_tokens"),
        (ChatRequest(model="gpt-9", messages=question().messages), NotFound, "model"),
        (ChatRequest(messages=[ChatMessage(role="x")]), InvalidRequest, "messages[0].role"),
        (
            ChatRequest(messages=[ChatMessage(role="user", content=[ContentPart()])]),
            InvalidRequest,
            "messages[0].content[0].type",
        ),
    ],
)
async def test_refusals_name_the_field(
    channel: grpc.aio.Channel, request_: ChatRequest, error: type[Exception], field: str
) -> None:
    with pytest.raises(error) as caught, rpc.calling("gateway"):
        async for _ in ChatServiceStub(channel).Chat(request_):
            pass
    assert caught.value.metadata["field"] == field  # type: ignore[attr-defined]


async def test_cancelling_the_call_cancels_the_request(
    stage: Stage, channel: grpc.aio.Channel
) -> None:
    async def slowly(rid: str, index: int) -> None:
        await asyncio.sleep(0.02)

    stage.scheduler.step = slowly
    stage.scheduler.answer = lambda spec: ([5] for _ in range(400))
    call = ChatServiceStub(channel).Chat(question())
    async for event in call:
        if event.WhichOneof("event") == "delta":
            break
    call.cancel()
    played = await stage.scheduler.taken()
    async with asyncio.timeout(5):
        await played.ended.wait()
        assert played.cancelled
        while await stage.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)


async def test_cancelling_before_admission_leaves_nothing(
    stage: Stage, channel: grpc.aio.Channel
) -> None:
    stage.preprocess.gate.clear()
    call = ChatServiceStub(channel).Chat(question())
    reading = asyncio.create_task(call.read())
    async with asyncio.timeout(5):
        while not stage.preprocess.seen:
            await asyncio.sleep(0.01)
        call.cancel()
        while await stage.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not stage.scheduler.played


async def test_health_reflection_and_models(stage: Stage, channel: grpc.aio.Channel) -> None:
    name = "tessera.gateway.v1.ChatService"
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for reply in reflection.ServerReflectionInfo(iter([listing])):
        assert name in [service.name for service in reply.list_services_response.service]
    models = await ChatServiceStub(channel).ListModels(ListModelsRequest())
    assert [(m.id, m.max_model_len) for m in models.models] == [(MODEL, 512)]


async def test_keys_and_limits_hold_here_too(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"api_key": "secret", "max_waiting_requests": 1}
    async with (
        open_stage(redis_url, model_folder, tokenizer, **changes) as stage,
        rpc.channel(stage.gateway.grpc_address) as channel,
    ):
        stub = ChatServiceStub(channel)
        with pytest.raises(Unauthenticated), rpc.calling("gateway"):
            await stub.ListModels(ListModelsRequest())
        key = (("authorization", "Bearer secret"),)
        stage.scheduler.taking = False
        waiting = stub.Chat(question(), metadata=key)
        assert (await waiting.read()).WhichOneof("event") == "accepted"
        with pytest.raises(Overloaded) as caught, rpc.calling("gateway"):
            await stub.Chat(question(), metadata=key).read()
        assert int(caught.value.metadata["retry_after_s"]) >= 1
        waiting.cancel()
