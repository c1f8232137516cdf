"""A room's gRPC server before it is ready."""

from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.rpc import RoomServer, calling, channel
from tessera.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


class Servicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: object
    ) -> scheduler_pb2.GetLoadResponse:
        return scheduler_pb2.GetLoadResponse(scheduler_id="s")


async def test_a_method_is_unavailable_while_its_service_loads(short_tmp: Path) -> None:
    async with (
        RoomServer(f"unix:{short_tmp}/s.sock", grace_s=0) as server,
        channel(server.address) as line,
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
