"""The public gRPC API."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from tokenizers import Tokenizer

from shared.errors import InvalidRequest, NotFound, Overloaded, Unauthenticated
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
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
    VideoFrames,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.neighbours import score
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage


@pytest.fixture
async def channel(stage: Stage) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(stage.gateway.grpc_address) as opened:
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
        temperature=0.5, seed=9, stop=["STOP"], return_token_ids=True, max_tokens=50, top_k=-1,
        max_window_size=400,
    )  # fmt: skip
    request.messages[0].content.add(image=b"picture")
    request.messages[0].content.add(image_url="https://example.org/a.png")
    request.messages[0].content.add(video=b"video")
    request.messages[0].content.add(video_url="https://example.org/a.mp4")
    frames = VideoFrames(frames=[b"one", b"two"], seconds_per_frame=0.25)
    request.messages[0].content.add(video_frames=frames)
    events = [event async for event in ChatServiceStub(channel).Chat(request)]
    assert text_of(events) == "one "
    assert stage.preprocess.seen[-1].max_window_size == 400
    assert events[-2].finished.stop == "STOP"
    ids = [token for event in events for token in event.delta.token_ids]
    assert len(ids) == events[-1].usage.completion_tokens
    assert len(events[0].accepted.prompt_token_ids) == events[0].accepted.prompt_tokens
    parts = stage.preprocess.seen[-1].conversation.messages[0].content
    assert (parts[1].media.data, parts[2].media.url) == (b"picture", "https://example.org/a.png")
    file, address, both = (part.video for part in parts[3:])
    assert (file.file.data, address.file.url) == (b"video", "https://example.org/a.mp4")
    assert [frame.data for frame in both.frames] == [b"one", b"two"]
    assert both.seconds_per_frame == 0.25
    sampling = stage.scheduler.played[events[0].accepted.request_id].spec.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 9, 0)


async def test_complete_takes_text_and_ids(stage: Stage, channel: grpc.aio.Channel) -> None:
    stub = ChatServiceStub(channel)
    for request in (
        CompleteRequest(text="The red"),
        CompleteRequest(token_ids=TokenIds(ids=stage.tokenizer.encode("The red").ids)),
    ):
        assert text_of([event async for event in stub.Complete(request)]) == ANSWER


async def test_choices_and_log_probabilities(stage: Stage, channel: grpc.aio.Channel) -> None:
    texts = ["one 🦊", "two red"]
    ids = [stage.tokenizer.encode(text).ids for text in texts]
    stage.scheduler.answer_choice = lambda spec, choice: [[token] for token in ids[choice]]
    request = question(n=2, logprobs=1, prompt_logprobs=2)
    events = [event async for event in ChatServiceStub(channel).Chat(request)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:2] == ["accepted", "prompt_logprobs"]
    assert kinds.count("finished") == 2 and kinds[-1] == "usage"
    rid = events[0].accepted.request_id
    assert [event.event_id for event in events[:2]] == [f"{rid}/h1", f"{rid}/0.0"]
    assert events[-1].event_id == f"{rid}/{len(ids[0])}e.{len(ids[1])}e"
    assert events[-1].usage.completion_tokens == len(ids[0]) + len(ids[1])
    prompt = events[1].prompt_logprobs.tokens
    assert len(prompt) == events[0].accepted.prompt_tokens
    assert not prompt[0].HasField("logprob") and len(prompt[1].top) == 2
    for choice, text in enumerate(texts):
        deltas = [event.delta for event in events if event.delta.choice == choice]
        told = [entry for delta in deltas for entry in delta.logprobs]
        assert "".join(delta.text for delta in deltas) == text
        assert [entry.token_id for entry in told] == ids[choice]
        assert b"".join(entry.token for entry in told).decode() == text
        for place, entry in enumerate(told):
            (_, top), (own, best) = score(entry.token_id, place, 1)
            assert (entry.logprob, entry.top[0].logprob) == pytest.approx((own, best))
            assert entry.top[0].token_id == top


async def test_every_option_reaches_the_scheduler(stage: Stage, channel: grpc.aio.Channel) -> None:
    options: dict[str, Any] = {
        "min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "logit_bias": {3: -5.0}, "allowed_token_ids": [3, 4],
        "bad_token_ids": [9], "bad_words": ["red"], "min_tokens": 2, "n": 2, "best_of": 3,
        "priority": -5, "ignore_eos": True, "stop_token_ids": [8], "logprobs": 4,
        "prompt_logprobs": 0,
    }  # fmt: skip
    events = [event async for event in ChatServiceStub(channel).Chat(question(**options))]
    spec = stage.scheduler.played[events[0].accepted.request_id].spec
    sampling = MessageToDict(spec.sampling, preserving_proto_field_name=True)
    expected = {**options, "logit_bias": {"3": -5.0}, "bad_words": sampling["bad_words"]}
    del expected["priority"]
    assert {name: sampling.get(name) for name in expected} == expected
    red = stage.tokenizer.encode("red").ids
    assert red in [list(word.ids) for word in spec.sampling.bad_words]


async def test_beams_can_be_asked_for(stage: Stage, channel: grpc.aio.Channel) -> None:
    request = question(use_beam_search=True, n=2, best_of=4, length_penalty=0.5)
    events = [event async for event in ChatServiceStub(channel).Chat(request)]
    for choice in range(2):
        assert text_of([event for event in events if event.delta.choice == choice]) == ANSWER
    spec = stage.scheduler.played[events[0].accepted.request_id].spec
    assert spec.sampling.use_beam_search and spec.sampling.best_of == 4


async def test_a_prompt_is_repeated_and_scored(stage: Stage, channel: grpc.aio.Channel) -> None:
    options = GenerationOptions(max_tokens=0, logprobs=1)
    request = CompleteRequest(text="The red", echo=True, options=options)
    events = [event async for event in ChatServiceStub(channel).Complete(request)]
    assert [event.WhichOneof("event") for event in events] == [
        "accepted",
        "delta",
        "finished",
        "usage",
    ]
    assert text_of(events) == "The red"
    assert len(events[1].delta.logprobs) == events[0].accepted.prompt_tokens
    assert events[-1].usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (question(n=0), InvalidRequest, "n"),
        (question(logprobs=21), InvalidRequest, "top_logprobs"),
        (question(bad_words=[" "]), InvalidRequest, "bad_words[0]"),
        (question(logit_bias={99999: 1}), InvalidRequest, "logit_bias"),
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
    with pytest.raises(error) as caught, calling("gateway"):
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
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
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
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    listed = await health.List(health_pb2.HealthListRequest())  # type: ignore[attr-defined]
    assert {listed.statuses[name].status, listed.statuses[""].status} == {answer.status}
    models = await ChatServiceStub(channel).ListModels(ListModelsRequest())
    (model,) = models.models
    assert (model.id, model.max_model_len) == (MODEL, 512)
    (card,) = (await stage.http.get("/v1/models")).json()["data"]
    assert model.parts.keys() == {"prompt", "decoder"}
    for name, part in model.parts.items():
        said: dict[str, Any] = {"code": part.code, "off": list(part.off)}
        for field in ("largest_difference", "ranks"):
            if part.HasField(field):
                said[field] = getattr(part, field)
        assert said == card["parts"][name]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_services_and_itself(
    stage: Stage, channel: grpc.aio.Channel, version: str
) -> None:
    itself = f"grpc.reflection.{version}.ServerReflection"
    # Both versions are the same bytes.
    ask = channel.stream_stream(
        f"/{itself}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    name = "tessera.gateway.v1.ChatService"
    wanted = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=s) for s in (name, itself)),
    ]
    listing, *files = [reply async for reply in ask(iter(wanted))]
    assert {name, itself} <= {service.name for service in listing.list_services_response.service}
    packages = []
    for reply in files:
        (data, *_) = reply.file_descriptor_response.file_descriptor_proto
        packages.append(FileDescriptorProto.FromString(data).package)
    assert packages == ["tessera.gateway.v1", f"grpc.reflection.{version}"]


async def test_keys_and_limits_hold_here_too(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"api_key": "secret", "max_waiting_requests": 1}
    async with (
        open_stage(redis_url, model_folder, tokenizer, **changes) as stage,
        open_channel(stage.gateway.grpc_address) as channel,
    ):
        stub = ChatServiceStub(channel)
        with pytest.raises(Unauthenticated), calling("gateway"):
            await stub.ListModels(ListModelsRequest())
        key = (("authorization", "Bearer secret"),)
        stage.scheduler.taking = False
        waiting = stub.Chat(question(), metadata=key)
        event = await waiting.read()
        assert isinstance(event, ChatEvent) and event.WhichOneof("event") == "accepted"
        with pytest.raises(Overloaded) as caught, calling("gateway"):
            await stub.Chat(question(), metadata=key).read()
        assert int(caught.value.metadata["retry_after_s"]) >= 1
        waiting.cancel()
