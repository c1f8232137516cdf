"""Concurrent calls for the same thing share one task."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from shared.net import tasks

_K = TypeVar("_K")
_T = TypeVar("_T")


class SingleFlight(Generic[_K, _T]):
    """At most one task for each key. Callers may leave: the task goes on for the others, or for nobody."""

    def __init__(self) -> None:
        self._tasks: dict[_K, asyncio.Task[_T]] = {}

    def __len__(self) -> int:
        """Number of tasks under way."""
        return len(self._tasks)

    def __contains__(self, key: _K) -> bool:
        return key in self._tasks

    async def run(self, key: _K, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of `work`, or of the task that is under way for the key. Raises what that raises."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)

    def cancel(self, key: _K) -> None:
        """Cancels the task of a key, if there is one; the next `run` begins another at once."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        await tasks.end(*self._tasks.values())

    def _done(self, key: _K, task: "asyncio.Task[_T]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved by every caller, or by none if all have left
