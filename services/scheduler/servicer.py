"""The scheduler's gRPC service: its load, for people and dashboards."""

from typing import Any

from services.scheduler.dispatcher import Dispatcher
from tessera.scheduler.v1 import scheduler_pb2
from tessera.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer


class SchedulerServicer(SchedulerServiceServicer):
    """Answers from the dispatcher's state; changes nothing."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: Any
    ) -> scheduler_pb2.GetLoadResponse:
        """Returns the load now."""
        return self._dispatcher.load()
