"""A service's gRPC server before it is ready, and what callers make of its errors."""

import gc
from pathlib import Path
from typing import Any

import grpc
import pytest

from shared import service_process
from shared.errors import Internal, InvalidRequest, Unavailable
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.net.rpc.server import RpcServer
from tessera.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


class Servicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: object
    ) -> scheduler_pb2.GetLoadResponse:
        return scheduler_pb2.GetLoadResponse(scheduler_id="s")


async def test_a_method_is_unavailable_while_its_service_loads(short_tmp: Path) -> None:
    async with (
        RpcServer(f"unix:{short_tmp}/s.sock", grace_s=0) as server,
        open_channel(server.address) as line,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(line)
        with pytest.raises(Unavailable, match="is starting; retry") as caught, calling("it"):
            await stub.GetLoad(scheduler_pb2.GetLoadRequest())
        assert caught.value.reason == "STARTING"
        server.add(
            "tessera.scheduler.v1.SchedulerService",
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            Servicer(),
        )
        await server.ready()
        with calling("it"):
            answer = await stub.GetLoad(scheduler_pb2.GetLoadRequest())
        assert answer.scheduler_id == "s"


class Failing(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Fails in its own code, or as gRPC does when a process goes in the middle of a call."""

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: Any
    ) -> scheduler_pb2.GetLoadResponse:
        raise ValueError("a mistake")


class Panic(BaseException):
    """Like that of a library in Rust, which is no `Exception`."""


class Panicking(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: Any
    ) -> scheduler_pb2.GetLoadResponse:
        raise Panic("a library gave up")


class Breaking(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: Any
    ) -> scheduler_pb2.GetLoadResponse:
        await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
        raise AssertionError("abort raises")


async def test_errors_of_the_server_and_broken_calls_are_distinguished(short_tmp: Path) -> None:
    name = "tessera.scheduler.v1.SchedulerService"
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    async with RpcServer(f"unix:{short_tmp}/s.sock", grace_s=0) as ours:
        ours.add(name, add, Failing())
        await ours.ready()
        async with open_channel(ours.address) as line:
            with pytest.raises(Internal), calling("it"):
                await scheduler_pb2_grpc.SchedulerServiceStub(line).GetLoad(
                    scheduler_pb2.GetLoadRequest()
                )
    broken = grpc.aio.server()
    add(Breaking(), broken)
    address = f"unix:{short_tmp}/b.sock"
    broken.add_insecure_port(address)
    await broken.start()
    try:
        async with open_channel(address) as line:
            with pytest.raises(Unavailable, match="it: Internal error"), calling("it"):
                await scheduler_pb2_grpc.SchedulerServiceStub(line).GetLoad(
                    scheduler_pb2.GetLoadRequest()
                )
    finally:
        await broken.stop(None)


def test_garbage_is_collected_again_once_a_service_has_loaded() -> None:
    thresholds = gc.get_threshold()
    try:
        service_process.load_without_collecting()
        assert not gc.isenabled()
        service_process.settle()
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


async def test_a_malformed_message_is_an_invalid_request(
    short_tmp: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        RpcServer(f"unix:{short_tmp}/s.sock", grace_s=0) as server,
        open_channel(server.address) as line,
    ):
        server.add(
            "tessera.scheduler.v1.SchedulerService",
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            Servicer(),
        )
        await server.ready()
        loads: Any = line.unary_unary("/tessera.scheduler.v1.SchedulerService/GetLoad")
        reflection: Any = line.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        )
        for call in (loads(b"\xff\xff\xff"), reflection(iter([b"\xff\xff\xff"])).read()):
            with pytest.raises(InvalidRequest) as caught, calling("it"):
                await call
            assert caught.value.reason == "MALFORMED_MESSAGE"
    out, err = capfd.readouterr()
    # The poller of gRPC for asyncio may still have an event for the closed loop of an earlier test.
    logged = [r for r in caplog.records if "PollerCompletionQueue" not in r.getMessage()]
    assert not any(record.exc_info for record in logged)
    assert "Traceback" not in out + err


async def test_a_panic_of_a_library_is_a_calls_error_and_not_its_silence(short_tmp: Path) -> None:
    async with RpcServer(f"unix:{short_tmp}/s.sock", grace_s=0) as server:
        server.add(
            "tessera.scheduler.v1.SchedulerService",
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            Panicking(),
        )
        await server.ready()
        async with open_channel(server.address) as line:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(line)
            for _ in range(2):
                with pytest.raises(Internal, match="internal error: Panic"), calling("it"):
                    await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=60)
