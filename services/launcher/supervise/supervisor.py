"""All supervised processes: started at once, stopped in order."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from services.launcher.supervise.supervised_process import SupervisedProcess

_STOP_WITHIN_S = 3.5  # the drain not counted
_FOUNDATION_S = 1.0  # Redis flushes its file
_KILLED_WITHIN_S = 5.0  # the kernel frees its memory: at once, unless the machine is overloaded


class Supervisor:
    """Runs stages of processes, which stop in the order of stages: gateways first.

    `foundation` is what all others need (Redis): ready before they start, stopped after they have ended.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[SupervisedProcess]],
        foundation: SupervisedProcess | None = None,
        drain_s: float = 0.0,
    ) -> None:
        """`drain_s`: seconds that the first stage may take to end in addition to the usual."""
        self._drain_s = drain_s
        self._stages = [list(stage) for stage in stages]
        self._foundation = [foundation] if foundation else []
        self._tasks: dict[SupervisedProcess, asyncio.Task[None]] = {}

    @property
    def processes(self) -> list[SupervisedProcess]:
        """All of them, in the order of stopping."""
        return [*(process for stage in self._stages for process in stage), *self._foundation]

    async def start(self) -> None:
        """Starts the foundation and, once that is ready, all others at once, those first that stop last: workers load
        longest. Raises GaveUp.
        """
        for process in self._foundation:
            self._run(process)
            await self._unless_given_up(process.ready.wait())
        for stage in reversed(self._stages):
            for process in stage:
                self._run(process)

    async def all_ready(self) -> None:
        """Returns when all are ready at the same time. Raises GaveUp as soon as one gives up."""
        while not all(process.ready.is_set() for process in self.processes):
            for process in self.processes:
                await self._unless_given_up(process.ready.wait())

    async def watch(self) -> None:
        """Never returns. Raises GaveUp as soon as one gives up."""
        await self._unless_given_up(asyncio.Event().wait())

    async def stop(self) -> None:
        """Ends all, stage by stage, within four seconds and the drain, and kills what is left then.

        A process that ends while answers drain is started again until the turn of its own stage.
        """
        deadline = asyncio.get_running_loop().time() + _STOP_WITHIN_S + self._drain_s
        drain = self._drain_s
        for stage in self._stages:
            left = deadline - _FOUNDATION_S - asyncio.get_running_loop().time() - drain
            # The first stage may take half of the time left, and so on; the last may take all of it.
            await self._end(stage, drain + (left if stage is self._stages[-1] else left / 2))
            drain = 0.0
        await self._end(self._foundation, _FOUNDATION_S)

    def kill(self) -> None:
        """Ends all of them at once."""
        for process in self.processes:
            process.kill()

    async def _end(self, processes: Sequence[SupervisedProcess], within_s: float) -> None:
        for process in processes:
            process.stop()
        tasks = [self._tasks[process] for process in processes if process in self._tasks]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=max(within_s, 0.1))
        for process in processes:
            process.kill()
        await asyncio.wait(tasks, timeout=_KILLED_WITHIN_S)

    def _run(self, process: SupervisedProcess) -> None:
        self._tasks[process] = asyncio.create_task(process.run(), name=process.name)

    async def _unless_given_up(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Waits for it; raises GaveUp as soon as one gives up."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait([task, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            for running in self._tasks.values():
                if running.done():
                    running.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
