"""What counts as broken."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

ANSWER_WITHIN_S = 60.0


class Broken(Exception):
    """An answer that no input may have, or none at all."""


async def ends_in_time(answer: Awaitable[T]) -> T:
    """The answer. Raises Broken if it does not come."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await answer
    except TimeoutError:
        raise Broken(f"no answer within {ANSWER_WITHIN_S:.0f} s") from None
