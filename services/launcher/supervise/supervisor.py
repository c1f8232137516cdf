"""All children together: started at once, stopped in order."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from services.launcher.supervise.supervised_process import Child

_STOP_WITHIN_S = 3.5  # the drain not counted
_FOUNDATION_S = 1.0  # Redis writes its file out
_KILLED_WITHIN_S = (
    5.0  # the kernel frees what it held; at once, unless the machine has too much to do
)


class Supervisor:
    """Runs stages of children; they stop in the order of stages: doors first.

    `foundation` is what all others need (Redis): ready before they start, stopped after they ended.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Child]],
        foundation: Child | None = None,
        drain_s: float = 0.0,
    ) -> None:
        """`drain_s`: how much longer than else the first stage may take to end."""
        self._drain_s = drain_s
        self._stages = [list(stage) for stage in stages]
        self._foundation = [foundation] if foundation else []
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    @property
    def children(self) -> list[Child]:
        """Every child, in the order of stopping."""
        return [*(child for stage in self._stages for child in stage), *self._foundation]

    async def start(self) -> None:
        """Starts the foundation and, once that is ready, all others at once. Raises GaveUp."""
        for child in self._foundation:
            self._run(child)
            await self._unless_given_up(child.ready.wait())
        for stage in self._stages:
            for child in stage:
                self._run(child)

    async def all_ready(self) -> None:
        """Returns when all are ready at the same time. Raises GaveUp as soon as one gives up."""
        while not all(child.ready.is_set() for child in self.children):
            for child in self.children:
                await self._unless_given_up(child.ready.wait())

    async def watch(self) -> None:
        """Returns never. Raises GaveUp as soon as one gives up."""
        await self._unless_given_up(asyncio.Event().wait())

    async def stop(self) -> None:
        """Ends all, stage by stage, within four seconds and the drain; what is left then is killed.

        What dies while answers drain is started again until its own stage has come.
        """
        deadline = asyncio.get_running_loop().time() + _STOP_WITHIN_S + self._drain_s
        drain = self._drain_s
        for stage in self._stages:
            left = deadline - _FOUNDATION_S - asyncio.get_running_loop().time() - drain
            # The first may take half of what is left, and so on; the last may take all of it.
            await self._end(stage, drain + (left if stage is self._stages[-1] else left / 2))
            drain = 0.0
        await self._end(self._foundation, _FOUNDATION_S)

    def kill(self) -> None:
        """Ends what runs, at once."""
        for child in self.children:
            child.kill()

    async def _end(self, children: Sequence[Child], within_s: float) -> None:
        for child in children:
            child.stop()
        tasks = [self._tasks[child] for child in children if child in self._tasks]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=max(within_s, 0.1))
        for child in children:
            child.kill()
        await asyncio.wait(tasks, timeout=_KILLED_WITHIN_S)

    def _run(self, child: Child) -> None:
        self._tasks[child] = asyncio.create_task(child.run(), name=child.name)

    async def _unless_given_up(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Waits for it, or for the first child that gives up, which it raises."""
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
