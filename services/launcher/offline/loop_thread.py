"""An event loop in a thread of its own, for callers without one or within another, as in a notebook."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shared.net import tasks

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tessera-requests", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The coroutine's result. An interruption of the caller, such as Ctrl-C, cancels it. Raises RuntimeError in a
        process that was forked from the one that made it, where the thread does not run.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("this LLM was made in another process: make one here")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], None]) -> None:
        """Ends the loop; the last thing that it does is `last`. Does nothing in a process that was forked."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(last)
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    """Cancels what runs, such as what an interruption has left."""
    running = asyncio.all_tasks() - {asyncio.current_task()}
    await tasks.end(*running)
