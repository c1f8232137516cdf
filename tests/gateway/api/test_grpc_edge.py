"""What a peer may do over gRPC before its key has been checked and its message been read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.api.tessera.grpc_limits import CallLimits
from services.gateway.body_budget import BodyBudget
from shared.errors import InvalidRequest, ServingError, Unauthenticated, Unavailable
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.net.rpc.server import RpcServer
from tessera.gateway.v1.chat_pb2 import (
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    GenerationOptions,
    VideoFrames,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tessera.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.gateway.stage import Stage, open_stage
from tests.support.network.raw_http2 import UnfinishedCall

CHAT = "/tessera.gateway.v1.ChatService/Chat"


@pytest.fixture
async def channel(stage: Stage) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(stage.gateway.grpc_address, 64 << 20) as opened:
        yield opened


def question(**options: object) -> ChatRequest:
    message = ChatMessage(role="user", content=[ContentPart(text="hello")])
    return ChatRequest(messages=[message], options=GenerationOptions(**options))  # type: ignore[arg-type]


async def refused(channel: grpc.aio.Channel, method: str, message: bytes) -> ServingError:
    """The error of a call with these bytes."""
    call: Any = channel.unary_stream(method)
    with pytest.raises(ServingError) as caught, calling("gateway"):
        async for _ in call(message):
            pass
    error: ServingError = caught.value
    return error


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\x05a", b"\xff" * 100_000])
async def test_what_is_no_protobuf_is_an_error_and_no_traceback(
    channel: grpc.aio.Channel,
    message: bytes,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for method in (CHAT, CHAT.replace("Chat", "GetRequest", 2).replace("GetRequestS", "ChatS")):
        error = await refused(channel, method, message)
        assert isinstance(error, InvalidRequest)
        assert error.reason == "MALFORMED_MESSAGE"
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err + caplog.text


async def test_the_key_comes_before_the_message(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="secret") as stage:
        port = int(stage.gateway.grpc_address.rpartition(":")[2])
        async with open_channel(stage.gateway.grpc_address) as channel:
            error = await refused(channel, CHAT, b"\xff\xff\xff")
            assert isinstance(error, Unauthenticated)
        async with UnfinishedCall(port, CHAT, 30 << 20) as call:
            await asyncio.sleep(1)
            assert call.sent <= 1 << 17


class Loads(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A service that is not the chat."""

    async def GetLoad(self, request: Any, context: Any) -> scheduler_pb2.GetLoadResponse:
        return scheduler_pb2.GetLoadResponse(scheduler_id="second")


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def test_a_second_service_needs_a_key_too() -> None:
    budget = BodyBudget(1 << 20)
    gate = CallLimits(ApiKeys(["secret"]), 1 << 16, budget)
    async with RpcServer("127.0.0.1:0", gate=gate, public=True, grace_s=0) as server:
        server.add(
            "tessera.scheduler.v1.SchedulerService",
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            Loads(),
        )
        # One of streams, which no generated service here has.
        server.grpc.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "second.Echo", {"All": grpc.stream_stream_rpc_method_handler(_echo)}
                )
            ]
        )
        await server.ready()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            echo: Any = channel.stream_stream("/second.Echo/All")
            wrong = (("authorization", "Bearer sesame"),)
            for metadata in ((), wrong):
                for call in (
                    stub.GetLoad(scheduler_pb2.GetLoadRequest(), metadata=metadata),
                    echo(iter([b"a"]), metadata=metadata),
                ):
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            right = (("authorization", "Bearer secret"),)
            answer = await stub.GetLoad(scheduler_pb2.GetLoadRequest(), metadata=right)
            assert answer.scheduler_id == "second"
            assert [m async for m in echo(iter([b"a", b"b"]), metadata=right)] == [b"a", b"b"]
            assert budget.held == 0
            health: Any = health_pb2_grpc.HealthStub(channel)
            checked = await health.Check(health_pb2.HealthCheckRequest())
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            asked: Any = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            names = [message async for message in asked(iter([b"\x3a\x00"]))]  # list_services
            assert b"tessera.scheduler.v1.SchedulerService" in names[0]


@pytest.mark.full
async def test_messages_are_received_within_the_budget(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_body_bytes": 2 << 20, "max_body_bytes_in_flight": 4 << 20}
    async with (
        open_stage(redis_url, model_folder, tokenizer, **limits) as stage,
        contextlib.AsyncExitStack() as stack,
    ):
        port = int(stage.gateway.grpc_address.rpartition(":")[2])
        calls = [UnfinishedCall(port, CHAT, 2 << 20, piece_every_s=0.1) for _ in range(8)]
        for call in calls:
            await stack.enter_async_context(call)
        async with asyncio.timeout(60):
            while max(call.sent for call in calls) < 1 << 19:  # one is received
                await asyncio.sleep(0.05)
        assert sum(call.sent > 1 << 17 for call in calls) == 1  # others stop at their windows
        async with open_channel(stage.gateway.grpc_address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(Unavailable, match="max-body-bytes-in-flight"), calling("it"):
                async for _ in ChatServiceStub(channel).Chat(question()):
                    pass
            for call in calls:
                await call.__aexit__()
            async for event in ChatServiceStub(channel).Chat(question()):
                last = event
            assert last.WhichOneof("event") == "usage"


async def never() -> AsyncIterator[bytes]:
    """The messages of a client that sends none."""
    await asyncio.Event().wait()
    yield b""


@contextlib.asynccontextmanager
async def silent_calls(stage: Stage, method: str, *counts: int) -> AsyncIterator[None]:
    """So many calls that send nothing, on a connection for each count."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        calls: list[Any] = []
        for count in counts:
            opened = grpc.aio.insecure_channel(stage.gateway.grpc_address, options=options)
            channel: Any = await stack.enter_async_context(opened)
            calls += [channel.stream_stream(method)(never()) for _ in range(count)]
        await asyncio.sleep(0.5)
        yield
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("counts", [(100,), (3,) * 15], ids=["one connection", "many"])
async def test_calls_that_send_nothing_do_not_delay_others(
    stage: Stage, channel: grpc.aio.Channel, counts: tuple[int, ...]
) -> None:
    check = "/grpc.health.v1.Health/Check"
    async with silent_calls(stage, CHAT, *counts), silent_calls(stage, check, *counts):
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async for event in ChatServiceStub(channel).Chat(question()):
            last = event
        assert last.WhichOneof("event") == "usage"


async def test_a_message_that_comes_slowly_keeps_its_place(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """While another call waits for room; the slow one's connection shows that it goes on."""
    limits = {"max_body_bytes": 4 << 20, "max_body_bytes_in_flight": 1024}  # one message at once
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        port = int(stage.gateway.grpc_address.rpartition(":")[2])
        async with (
            UnfinishedCall(port, CHAT, 3 << 20, piece_every_s=0.02) as slow,
            open_channel(stage.gateway.grpc_address) as channel,
        ):
            await asyncio.sleep(0.3)
            waiting = asyncio.ensure_future(_last(ChatServiceStub(channel).Chat(question())))
            for _ in range(10):
                before = slow.sent
                async with asyncio.timeout(60):  # its stream is still there
                    while slow.sent == before:
                        await asyncio.sleep(0.2)
                assert not waiting.done()
            slow.pause()
            assert (await waiting).WhichOneof("event") == "usage"  # silence costs it its place


async def _last(events: Any) -> Any:
    async for event in events:
        last = event
    return last


def parts(count: int) -> ChatMessage:
    return ChatMessage(role="user", content=[ContentPart(text="x")] * count)


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (ChatRequest(messages=[parts(1)] * 5000), "messages", "4096"),
        (ChatRequest(messages=[parts(3000)] * 3), "messages[2].content[2192]", "8192"),
        (question(bad_token_ids=[1] * 70_000), "bad_token_ids", "65536"),
        (question(stop_token_ids=[1] * 2000), "stop_token_ids", "1024"),
        (
            ChatRequest(
                messages=[
                    ChatMessage(
                        role="user",
                        content=[ContentPart(video_frames=VideoFrames(frames=[b"x"] * 2000))],
                    )
                ]
            ),
            "messages[0].content[0].video_url",
            "1024",
        ),
    ],
    ids=["messages", "parts", "bad_token_ids", "stop_token_ids", "frames"],
)
async def test_lists_have_limits_here_too(
    channel: grpc.aio.Channel, request_: ChatRequest, field: str, limit: str
) -> None:
    error = await refused(channel, CHAT, request_.SerializeToString())
    assert error.metadata["field"] == field
    assert limit in error.message


@pytest.mark.parametrize(
    "message",
    [
        b"\x12\x00" * 2_000_000,  # messages without anything
        b"\x12\x82\x89\x7a" + b"\x12\x00" * 1_000_001,  # parts of one message
        question(bad_token_ids=[1] * 1_100_000).SerializeToString(),
    ],
    ids=["messages", "parts", "numbers"],
)
async def test_what_unfolds_in_memory_is_not_parsed(
    channel: grpc.aio.Channel, message: bytes
) -> None:
    error = await refused(channel, CHAT, message)
    assert error.reason == "BODY_TOO_RICH"
    assert "1000000 values" in error.message


async def test_a_long_prompt_of_ids_is_still_read(channel: grpc.aio.Channel) -> None:
    request = CompleteRequest()
    request.token_ids.ids.extend([3] * 100_000)
    error = await refused(channel, CHAT.replace("/Chat", "/Complete"), request.SerializeToString())
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
