"""The batches that this gateway leads, by leases that it renews. Those of a gateway that has ended are taken over."""

import asyncio
import contextlib

import structlog

from services.gateway.api.batch_runs.run import BatchRun
from services.gateway.api.parts import Parts
from shared.errors import ServingError, Unavailable
from shared.net import tasks
from shared.queue.keys import new_instance_id

log = structlog.get_logger(__name__)

_MOST_BATCHES = 16
_MOST_LINES = 64
_ROUNDS_A_LEASE = 5


class BatchRunner:
    """Begins with the gateway, and ends with it: what is under way then goes on elsewhere, at once where it has time to
    say so."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._gateway = new_instance_id()
        self._lease_s = parts.timings.batch_lease_s
        self._led: list[str] = []
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._places = asyncio.Semaphore(_MOST_LINES)
        self._has_room = True
        self._woken = parts.batch_forms.woken
        parts.work.keep_up("running batches", self._rounds)
        parts.work.at_end(self._release)

    async def _rounds(self) -> None:
        try:
            while True:
                with contextlib.suppress(Unavailable):
                    await self._round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._lease_s / _ROUNDS_A_LEASE):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            await tasks.end(*(task for _, task in self._runs.values()))

    async def _release(self) -> None:
        if self._led:
            with contextlib.suppress(Unavailable):  # else they run out
                await self._parts.batches.release(self._gateway, self._led)

    async def _round(self) -> None:
        store = self._parts.batches
        most = len(self._led) if self._parts.health.is_draining else _MOST_BATCHES
        led = await store.lease(self._gateway, round(self._lease_s * 1000), most, self._led)
        self._has_room = led.bytes <= store.limit_bytes
        self._led = [*led.statuses]
        for batch_id, (_, task) in self._runs.items():
            if batch_id not in led.statuses:
                task.cancel()
        for batch_id, status in led.statuses.items():
            if batch_id not in self._runs:
                await self._begin(batch_id)
            elif status == "cancelling":
                self._runs[batch_id][0].cancel()

    async def _begin(self, batch_id: str) -> None:
        store = self._parts.batches
        tenant = await store.tenant(batch_id)
        batch = await store.find(batch_id, tenant) if tenant is not None else None
        if batch is None:
            return
        run = BatchRun(self._parts, batch, self._gateway, self._places, lambda: self._has_room)
        task = tasks.begin(self._run(batch_id, run))
        self._runs[batch_id] = run, task
        task.add_done_callback(lambda _: self._runs.pop(batch_id, None))

    async def _run(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except ServingError as error:  # the next round goes on with it, here or elsewhere
            log.warning("a batch was interrupted", batch=batch_id, error=error.reason)
        except Exception as error:
            log.exception("a batch cannot be gone on with", batch=batch_id)
            with contextlib.suppress(ServingError):
                await run.fail(f"internal error ({type(error).__name__})")
