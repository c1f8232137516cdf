"""Threads on which steps run: one that computes, so that plans run strictly in order, and one that collects."""

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")

_SWITCH_S = 2e-4  # the compute thread hands the interpreter to the event loop this soon


class Executor:
    """Runs jobs one after the other, in the order of their submission."""

    def __init__(self, name: str = "compute", begin: Callable[[], None] = lambda: None) -> None:
        """Starts a thread of that name, which first calls `begin`."""
        sys.setswitchinterval(_SWITCH_S)
        self._begin = begin
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job later; it reports its own errors."""
        self._jobs.put(job)

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job after all before it, and waits for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value = job()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, done, error)
            else:
                loop.call_soon_threadsafe(_succeed, done, value)

        self.submit(work)
        return await done

    def stop(self) -> None:
        """Lets the running job finish and ends the thread."""
        self._jobs.put(None)

    def _work(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job failed without saying so")


def _succeed(done: asyncio.Future[T], value: T) -> None:
    if not done.cancelled():
        done.set_result(value)


def _fail(done: asyncio.Future[T], error: BaseException) -> None:
    if not done.cancelled():
        done.set_exception(error)
