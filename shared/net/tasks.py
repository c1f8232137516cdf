"""Several tasks at once, and ending background tasks."""

import asyncio
import contextvars
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from shared.telemetry import request_names

_AGAIN_S = 0.2

_T = TypeVar("_T")


def begin(work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
    """A task that works for many requests: its log lines do not carry the names of the request that starts it."""
    context = contextvars.copy_context()
    context.run(request_names.unbind)
    return asyncio.get_running_loop().create_task(work, context=context)


async def together(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order; when one fails the others are stopped and its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _stop(tasks)
        tasks.clear()  # an error's traceback refers to this frame, and its task to the error


async def _stop(tasks: list["asyncio.Task[_T]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def end(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancels tasks and waits until they are done; what they raise is ignored.

    A single cancel may be lost: the Redis client swallows one that arrives together with its reply, and a loop around
    it would go on. So it is repeated.
    """
    started = [task for task in tasks if task is not None]
    pending = {task for task in started if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    for task in started:
        if not task.cancelled():
            task.exception()
