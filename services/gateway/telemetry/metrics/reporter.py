"""Decides which gateway reports the metrics of schedulers, decoders and the queue.

If all did, a sum over gateways would count them several times. So one gateway holds a lease in Redis, which it renews
every second; when it dies, another one gets the lease three seconds later. The lease is checked for every page of
metrics, so that two gateways never report at the same time.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self

from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.metrics.scheduler_load import SchedulerLoad
from shared.errors import Unavailable
from shared.net import supervise
from shared.net.metrics_page import Page
from shared.net.supervise import Background
from shared.queue import Queue
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

_RENEW_S = 1.0
_LEASE_MS = 3_000


class Reporter:
    """This gateway's claim on the lease. `async with` begins to claim it; leaving the block gives it back."""

    def __init__(self, queue: Queue, load: SchedulerLoad, instance_id: str) -> None:
        self._queue = queue
        self._load = load
        self._instance_id = instance_id
        self._work: Background | None = None

    async def __aenter__(self) -> Self:
        self._work = Background("reporter", self._renew)
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(self._work)
        self._load.leave_out()
        with contextlib.suppress(Unavailable):
            await self._queue.report(self._instance_id, 0)

    async def look(self) -> None:
        """Reads the load of the schedulers, or nothing if another gateway reports it. While Redis is away everything
        stays as it was: no other gateway can get the lease then.
        """
        with contextlib.suppress(Unavailable):
            loads = await self._queue.loads()
            live = await self._queue.depth()
            stored = await self._queue.stored()
            decoders = [decoder for load in loads for decoder in load.decoders]
            numbers = await self._claim(decoders)
            if numbers is None:
                self._load.leave_out()
            else:
                queue = await self._queue.queue_age()
                engines = dict(zip(numbers, decoders, strict=True))
                self._load.update(engines, live, queue, *stored)

    async def page(self, metrics: Metrics, accept: str) -> Page:
        """This gateway's page of metrics in the form that the header Accept asks for, with the schedulers' load if it
        reports that."""
        await self.look()
        return metrics.page(accept)

    async def _renew(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_RENEW_S)

    async def _claim(self, decoders: Sequence[DecoderLoad]) -> list[int] | None:
        ids = [decoder.decoder_id for decoder in decoders]
        return await self._queue.report(self._instance_id, _LEASE_MS, ids)
