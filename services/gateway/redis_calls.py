"""Calls to Redis that must run to their end, be repeated when their outcome is unknown, or not block
for long.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shared.environment import monotonic
from shared.errors import ServingError, Unavailable
from shared.queue import Queue

_SETTLE_S = 10.0
_RETRY_S = 0.1
# A little longer than the queue pauses after Redis has come back.
_RECOVERY_S = 4.0
_RECOVERED_YET_S = 0.2

_T = TypeVar("_T")


async def until_recovered(queue: Queue) -> None:
    """Waits while gateways and schedulers restore what Redis has lost: until then a missing request
    may still come back. Raises Unavailable.
    """
    give_up_at = monotonic() + _RECOVERY_S
    while await queue.is_recovering() and monotonic() < give_up_at:
        await asyncio.sleep(_RECOVERED_YET_S)


async def within(call: Coroutine[Any, Any, _T], seconds: float) -> _T:
    """Awaits a call to Redis for at most so long; the call itself is never cancelled. Raises Unavailable
    when it takes longer: a frozen Redis must not freeze its clients.
    """
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        raise Unavailable("REDIS_UNAVAILABLE", "Redis does not answer; retry later")
    return task.result()


async def asked_again(call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Repeats a call during which Redis went away, since it is not known whether it was executed. For
    calls that may be made twice. Raises Unavailable when Redis stays away.
    """
    give_up_at = monotonic() + _SETTLE_S
    while True:
        try:
            return await call()
        except Unavailable:
            if monotonic() > give_up_at:
                raise
        await asyncio.sleep(_RETRY_S)


async def to_its_end(call: Coroutine[Any, Any, _T]) -> _T:
    """Awaits a call to Redis to its end even if this task is cancelled, so that its outcome is known."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(ServingError):
            await task
        raise
