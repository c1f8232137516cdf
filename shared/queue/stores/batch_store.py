"""Batches: many requests in a file, which gateways send one by one. The gateway that leads a batch has a lease on it;
when that runs out, another one goes on.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from shared.environment import random_hex
from shared.errors import InvalidRequest, Overloaded
from shared.queue.keys import Keys
from shared.queue.stores.file_store import is_file_id, no_room
from shared.queue.stores.stored import Record, StoredVerbs

# What ids of OpenAI's batches begin with, and those of Anthropic's.
KIND, MESSAGE_KIND = "batch", "msgbatch"
COMPLETED, FAILED = "completed", "failed"
# Of a line that was left when its batch ended.
UNSENT = "unsent"
STATUSES = (
    *("validating", "in_progress", "finalizing", "cancelling"),
    *(COMPLETED, FAILED, "expired", "cancelled"),
)

Words = tuple[str | bytes | int, ...]

_NAME = re.compile(rf"(?:{KIND}|{MESSAGE_KIND})_[0-9a-f]{{32}}")
_MOST_OPEN = 1000
# What a batch has written of a file is kept for so long while nobody goes on with it.
_UNFINISHED_MS = 30 * 86_400_000


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One batch. Times are in ms since 1970, None where a status was not reached."""

    id: str
    tenant: str
    input: str
    endpoint: str
    window: str
    # JSON, empty for none.
    metadata: bytes
    # Of the files that it writes.
    output: str
    errors: str
    output_keep_ms: int
    status: str
    created_ms: int
    expires_ms: int
    times: Mapping[str, int]
    # Lines of its file; None until they have been counted.
    total: int | None
    completed: int
    failed: int
    unsent: int
    # What is wrong with its lines, as JSON; empty for nothing.
    problems: bytes
    # How it will end, once no more results are taken; empty until then.
    outcome: str
    # Pieces of the files that have been written.
    output_pieces: int
    error_pieces: int


@dataclass(frozen=True, slots=True)
class Led:
    """What a gateway leads: the status of each batch; `bytes` of all files and batches."""

    bytes: int
    statuses: Mapping[str, str]


def new_batch_id(kind: str = KIND) -> str:
    """A name that nobody can guess."""
    return f"{kind}_{random_hex(16)}"


def kind_of(batch_id: str) -> str:
    """What the id of a batch begins with."""
    return batch_id.partition("_")[0]


class BatchStore(StoredVerbs):
    """The batches of one model. All methods raise Unavailable when Redis is away or refuses to write."""

    def __init__(self, redis: Redis, keys: Keys, limit_bytes: int) -> None:
        """`limit_bytes` of all files and batches together."""
        super().__init__(redis, keys)
        self.limit_bytes = limit_bytes

    async def create(
        self,
        batch_id: str,
        tenant: str,
        file_id: str,
        window_ms: int,
        keep_ms: int,
        fields: Mapping[str, str | bytes | int],
    ) -> None:
        """Accepts a batch of a file's lines that may take `window_ms`, and is kept for `keep_ms` more. Raises
        InvalidRequest where the tenant has no such file, Overloaded where there is no room.
        """
        words: Words = (file_id, window_ms, keep_ms, _MOST_OPEN, self.limit_bytes, *_flat(fields))
        answer = b"GONE"
        if is_file_id(file_id):
            answer = await self._scripts.call("batch_create", batch_id, tenant, *words)
        if answer == b"GONE":
            raise InvalidRequest(
                "FILE_NOT_FOUND",
                f"input_file_id: there is no file {file_id[:64]!r} of yours",
                field="input_file_id",
            )
        if answer == b"MANY":
            raise Overloaded(
                "TOO_MANY_BATCHES",
                f"{_MOST_OPEN} batches have not ended: wait for one",
                retry_after_s="60",
            )
        if answer == b"FULL":
            raise no_room(self.limit_bytes)

    async def find(self, batch_id: str, tenant: str) -> StoredBatch | None:
        """A tenant's batch; None for none."""
        if not _NAME.fullmatch(batch_id):
            return None
        (found,) = await self.records([batch_id], tenant)
        return None if found is None else _batch(batch_id, found)

    async def tenant(self, batch_id: str) -> str | None:
        """Whose it is; None where it is gone."""
        (found,) = await self._ask([("HGET", self._keys.stored(batch_id), "tenant")])
        return None if found is None else str(found, "utf-8")

    async def page(
        self, kind: str, tenant: str, after: str, most: int, *, oldest_first: bool = False
    ) -> list[StoredBatch] | None:
        """At most so many of a tenant's batches of a kind behind `after`; None where that is none of them."""
        names = await self.names(kind, tenant, after, most, oldest_first=oldest_first)
        if names is None:
            return None
        found = await self.records(names, tenant)
        return [_batch(name, one) for name, one in zip(names, found, strict=True) if one]

    async def cancel(self, batch_id: str, tenant: str) -> str | None:
        """Asks for its end. Returns its status from now on; None where there is none."""
        if not _NAME.fullmatch(batch_id):
            return None
        answer = await self._scripts.call("batch_cancel", batch_id, tenant)
        return None if answer == b"GONE" else str(answer, "ascii")

    async def forget(self, batch_id: str, tenant: str, files: Sequence[str]) -> str:
        """Removes a batch that has ended, and files that it has for itself. Returns "done", "gone" where there is none,
        or "open" where it has not ended.
        """
        if not _NAME.fullmatch(batch_id):
            return "gone"
        return str(await self._scripts.call("batch_forget", batch_id, tenant, *files), "ascii")

    async def lease(self, gateway: str, lease_ms: int, most: int, led: Sequence[str]) -> Led:
        """Renews a gateway's leases on batches that it leads, and takes others, up to `most`."""
        words: Words = (gateway, lease_ms, most, *led)
        size, *flat = await self._scripts.call("batch_lease", *words)
        texts = [str(word, "ascii") for word in flat]
        return Led(int(size), dict(zip(texts[::2], texts[1::2], strict=True)))

    async def release(self, gateway: str, led: Sequence[str]) -> None:
        """Gives up the leases of a gateway that ends: others need not wait until they run out."""
        await self._scripts.call("batch_release", gateway, *led)

    async def note(
        self, batch_id: str, gateway: str, status: str, **fields: str | bytes | int
    ) -> bool:
        """Writes its state, and ends it with the last statuses. Returns False where the gateway does not lead it."""
        flat = _flat(fields)
        return bool(await self._scripts.call("batch_note", batch_id, gateway, status, *flat))

    async def keep_result(self, batch_id: str, line: int, kind: str, result: bytes) -> bool:
        """Keeps the result of a line, unless it has one. `kind` is COMPLETED, FAILED or UNSENT."""
        return bool(await self._scripts.call("batch_result", batch_id, line, kind, result))

    async def lines_with_results(self, batch_id: str) -> set[int]:
        """The numbers of lines whose results are kept and have not been moved."""
        (found,) = await self._ask([("HKEYS", f"{self._keys.stored(batch_id)}:results")])
        return {int(line) for line in found}

    async def results(self, batch_id: str, lines: Sequence[int]) -> list[tuple[int, bool, bytes]]:
        """Of these lines those with results: number, whether it is completed, and the result."""
        key = f"{self._keys.stored(batch_id)}:results"
        (found,) = await self._ask([("HMGET", key, *lines)])
        return [
            (line, value.startswith(b"c"), value[1:])
            for line, value in zip(lines, found, strict=True)
            if value is not None
        ]

    async def move(
        self,
        batch_id: str,
        gateway: str,
        file_id: str,
        number: int,
        piece: bytes,
        lines: Sequence[int],
    ) -> bool:
        """Moves the results of lines into a file that is not finished, as its piece of this number. Returns False where
        the gateway does not lead the batch, or they have been moved.
        """
        words: Words = (batch_id, gateway, file_id, number, _UNFINISHED_MS, piece, *lines)
        return bool(await self._scripts.call("batch_move", *words))


def _flat(fields: Mapping[str, str | bytes | int]) -> list[str | bytes | int]:
    return [word for pair in fields.items() for word in pair]


def _batch(batch_id: str, found: Record) -> StoredBatch:
    def text(name: str) -> str:
        return found.get(name, b"").decode()

    def number(name: str) -> int:
        return int(found.get(name, 0))

    output, errors = text("output"), text("errors")
    times = {name: int(found[f"{name}_ms"]) for name in STATUSES if f"{name}_ms" in found}
    return StoredBatch(
        id=batch_id,
        tenant=text("tenant"),
        input=text("input"),
        endpoint=text("endpoint"),
        window=text("window"),
        metadata=found.get("metadata", b""),
        output=output,
        errors=errors,
        output_keep_ms=number("output_keep_ms"),
        status=text("status"),
        created_ms=number("created_ms"),
        expires_ms=number("expires_ms"),
        times=times,
        total=number("total") if "total" in found else None,
        completed=number("completed"),
        failed=number("failed"),
        unsent=number(UNSENT),
        problems=found.get("problems", b""),
        outcome=text("outcome"),
        output_pieces=number(f"pieces:{output}"),
        error_pieces=number(f"pieces:{errors}"),
    )
