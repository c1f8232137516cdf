"""Waits for the members of a service."""

import asyncio

from shared.queue.registry import Directory, Member


async def first_member(directory: Directory, timeout_s: float = 60.0) -> Member:
    """The first member that the registry lists. Raises TimeoutError when none comes."""
    async with asyncio.timeout(timeout_s):
        while not directory.members:
            await directory.changed()
    return directory.members[0]
