"""One line on the terminal while a run lasts, drawn twice a second: more often would cost what is measured."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from benchmarks.load.load import Load

_EVERY_S = 0.5
_WIDTH = 30


@contextlib.asynccontextmanager
async def shown(load: Load, *, enabled: bool) -> AsyncIterator[None]:
    """Draws inside the block, if the error output is a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_draw(load))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        print(f"\r{line(load, 0.0)}", file=sys.stderr)


def line(load: Load, elapsed_s: float) -> str:
    """The bar, the counts, and how long the rest will take at this pace."""
    ended = len(load.recordings)
    filled = _WIDTH * ended // max(1, load.total)
    bar = "#" * filled + "." * (_WIDTH - filled)
    left = f", {elapsed_s / ended * (load.total - ended):.0f} s left" if ended and elapsed_s else ""
    return f"[{bar}] {ended}/{load.total} ended, {load.num_running} running{left}   "


async def _draw(load: Load) -> None:
    began = time.perf_counter()
    while True:
        print(f"\r{line(load, time.perf_counter() - began)}", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(_EVERY_S)
