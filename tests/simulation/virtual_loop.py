"""An event loop whose clock jumps from one timer to the next, and processes that can die or freeze on it.

Everything happens in one thread, in an order that depends on nothing but the seed: callbacks run as they became ready,
timers by time and then by the order in which they were set. A callback belongs to the process in whose context it was
made, so a killed process stops between two callbacks, as kill -9 stops a program between two instructions: no
`finally` of it runs, and what it had sent is on its way.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

_process: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


def current_process() -> "Process | None":
    """The process whose code is running."""
    return _process.get()


class Process:
    """One process: a program from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.backlog: deque[asyncio.Handle] = deque()  # what came due while it was frozen
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self.on_death: list[Callable[[], None]] = []  # what the kernel does: it closes the sockets

    def __repr__(self) -> str:
        return self.name


class _Task(asyncio.Task[Any]):
    """A task with a fixed hash. Sets of tasks are iterated in order of hashes, which otherwise are addresses and differ
    from run to run.
    """

    def __init__(self, number: int, coro: Any, **kwargs: Any) -> None:
        self._number = number  # first: the base class puts it into a set
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class Stuck(AssertionError):
    """No callback or timer is left, or there were too many events."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time; `events` counts callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[asyncio.Handle]  # of the base class, which does not declare it
        self.now = 0.0
        self.events = 0
        self.max_events = 2_000_000
        self.failures: list[str] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count(1)
        self._kept: dict[asyncio.Task[Any], None] = {}
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Seconds of the virtual clock."""
        return self.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Sets a timer."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """The same as the base class's, without its checks."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def get_debug(self) -> bool:
        """Never."""
        return False

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """There are no threads: it is done at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def spawn(self, process: Process, body: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task of a process."""
        return process.context.run(self.create_task, body)

    def call_in(self, process: Process, callback: Callable[..., Any], *args: Any) -> None:
        """Has a process run something soon."""
        self.call_soon(callback, *args, context=process.context)

    def kill(self, process: Process) -> None:
        """Ends a process: none of its callbacks runs any more, and its sockets are closed."""
        process.alive = False
        process.backlog.clear()
        for close in process.on_death:
            close()

    def resume(self, process: Process) -> None:
        """Resumes a frozen process with all that came due meanwhile."""
        process.frozen = False
        self._ready.extend(process.backlog)
        process.backlog.clear()

    def close_suspended(self) -> None:
        """At the end: closes suspended tasks in a fixed order, without warnings."""
        for task in list(self._kept):
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                # Each `finally` runs up to its first `await`, and what it then says does not matter.
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self._kept.clear()
        self._timers.clear()
        self._ready.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Records the failure of a task that nothing awaited."""
        error = context.get("exception")
        if error is not None:
            self.failures.append(f"{context['message']}: {error!r}")

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: Any = None, **kwargs: Any
    ) -> asyncio.Task[Any]:
        task = _Task(next(self._numbers), coro, loop=loop, context=context, **kwargs)
        self._kept[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._kept.pop(task, None)

    def _run_once(self) -> None:
        while not self._ready:
            if not self._timers:
                raise Stuck("nothing is left to happen")
            when, _, timer = heapq.heappop(self._timers)
            if not timer._cancelled:
                self.now = max(self.now, when)
                self._ready.append(timer)
        handle = self._ready.popleft()
        if handle._cancelled:
            return
        process = handle._context.get(_process)  # type: ignore[attr-defined]
        if process is not None:
            if not process.alive:
                return
            if process.frozen:
                process.backlog.append(handle)
                return
        self.events += 1
        if self.events > self.max_events:
            raise Stuck(f"more than {self.max_events} events")
        handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass
