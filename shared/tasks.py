"""Ending background tasks."""

import asyncio
from typing import Any

_AGAIN_S = 0.2


async def end(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancels tasks and waits until they are done; what they raise is not heard.

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
