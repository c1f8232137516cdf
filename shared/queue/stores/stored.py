"""What files and batches have in common: records of a tenant's, read one by one or in the order of their age."""

from collections.abc import Mapping, Sequence

from shared.net.redis.connection import Word
from shared.queue.recovery import RecoveryVerbs

Record = Mapping[str, bytes]


class StoredVerbs(RecoveryVerbs):
    """Reads records. All methods raise Unavailable when Redis is away or refuses to write."""

    async def records(self, names: Sequence[str], tenant: str) -> list[Record | None]:
        """The fields of each; None for what is not there any more, or another tenant's."""
        commands: list[tuple[Word, ...]] = [("HGETALL", self._keys.stored(name)) for name in names]
        (seconds, _), *found = await self._ask([("TIME",), *commands])
        return [_readable(fields, tenant, int(seconds) * 1000) for fields in found]

    async def now_ms(self) -> int:
        """The time by which records expire."""
        ((seconds, us),) = await self._ask([("TIME",)])
        return int(seconds) * 1000 + int(us) // 1000

    async def names(
        self, kind: str, tenant: str, after: str, most: int, *, oldest_first: bool = False
    ) -> list[str] | None:
        """The ids of at most so many behind one, from the beginning for an empty one; None where that is not there.
        `kind` is the first part of their ids.
        """
        key, start = self._keys.stored_of(kind, tenant), 0
        rank_by, range_by = ("ZRANK", "ZRANGE") if oldest_first else ("ZREVRANK", "ZREVRANGE")
        if after:
            (rank,) = await self._ask([(rank_by, key, after)])
            if rank is None:
                return None
            start = int(rank) + 1
        (found,) = await self._ask([(range_by, key, start, start + most - 1)])
        return [str(name, "ascii") for name in found]


def _readable(fields: Mapping[bytes, bytes], tenant: str, now_ms: int) -> Record | None:
    found = {str(name, "ascii"): value for name, value in fields.items()}
    if found.get("tenant") != tenant.encode():
        return None
    ends_ms = int(found.get("dropped_ms", found["expires_ms"]))
    return found if ends_ms > now_ms else None
