"""Files that clients send and batches write: pieces of about 1 MiB in Redis, which are a file once it is finished."""

import re
from dataclasses import dataclass

from redis.asyncio import Redis

from shared.environment import random_hex
from shared.errors import Conflict, Overloaded
from shared.queue.keys import Keys
from shared.queue.stores.stored import Record, StoredVerbs

PIECE_BYTES = 1 << 20
KIND = "file"
# Files that batches have for themselves: no list has them.
INNER_KIND = "inner"

_NAME = re.compile(rf"(?:{KIND}|{INNER_KIND})-[0-9a-f]{{32}}")
# Records that are read at once.
_AT_ONCE = 200
# An upload that stands still for so long is dropped.
_UNFINISHED_MS = 15 * 60_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file."""

    id: str
    name: str
    purpose: str
    bytes: int
    pieces: int
    created_ms: int
    expires_ms: int


def new_file_id(kind: str = KIND) -> str:
    """A name that nobody can guess."""
    return f"{kind}-{random_hex(16)}"


class FileStore(StoredVerbs):
    """The files of one model. All methods raise Unavailable when Redis is away or refuses to write."""

    def __init__(self, redis: Redis, keys: Keys, limit_bytes: int) -> None:
        """`limit_bytes` of all files and batches together."""
        super().__init__(redis, keys)
        self.limit_bytes = limit_bytes

    async def add(self, file_id: str, number: int, piece: bytes) -> None:
        """Writes the next piece of a file that is not finished; the first has number 0. May be called again. Raises
        Overloaded where there is no room.
        """
        words = (file_id, number, piece, self.limit_bytes, _UNFINISHED_MS)
        if not await self._scripts.call("file_add", *words):
            raise no_room(self.limit_bytes)

    async def finish(
        self, file_id: str, tenant: str, keep_ms: int, *, name: str, purpose: str, pieces: int
    ) -> bool:
        """Makes a file of its pieces. May be called again. Returns False where they are gone."""
        fields = ("name", name, "purpose", purpose, "pieces", pieces)
        return bool(await self._scripts.call("file_finish", file_id, tenant, keep_ms, *fields))

    async def find(self, file_id: str, tenant: str) -> StoredFile | None:
        """A tenant's file; None for none."""
        if not is_file_id(file_id):
            return None
        (found,) = await self.records([file_id], tenant)
        return None if found is None else _file(file_id, found)

    async def page(
        self, tenant: str, after: str, most: int, purpose: str = "", *, oldest_first: bool = False
    ) -> list[StoredFile] | None:
        """At most so many of a tenant's files behind `after`; of one purpose, unless that is empty. None where `after`
        is none of them.
        """
        files: list[StoredFile] = []
        while len(files) < most:
            some = min(most, _AT_ONCE)
            names = await self.names(KIND, tenant, after, some, oldest_first=oldest_first)
            if not names:
                return None if names is None and not files else files
            found = await self.records(names, tenant)
            those = [_file(name, one) for name, one in zip(names, found, strict=True) if one]
            files += [file for file in those if purpose in ("", file.purpose)]
            after = names[-1]
        return files[:most]

    async def piece(self, file_id: str, number: int) -> bytes | None:
        """One piece; None where it is gone."""
        (found,) = await self._ask([("HGET", f"{self._keys.stored(file_id)}:pieces", number)])
        return None if found is None else bytes(found)

    async def forget(self, file_id: str, tenant: str) -> bool:
        """Removes a file, or what was written of one. Returns whether there was anything. Raises Conflict while a batch
        reads it.
        """
        answer = await self._scripts.call("file_forget", file_id, tenant)
        if answer == b"USED":
            raise Conflict(
                "FILE_IN_USE", f"a batch reads {file_id}: cancel it first, or wait for its end"
            )
        return bool(answer == b"DONE")


def is_file_id(name: str) -> bool:
    """Whether a file may have this id."""
    return _NAME.fullmatch(name) is not None


def no_room(limit_bytes: int) -> Overloaded:
    """The error where files and batches leave no room."""
    return Overloaded(
        "FILE_STORE_FULL",
        f"files and batches fill the limit of {limit_bytes} bytes (--file-store-bytes): delete files, or retry when"
        " some have expired",
        retry_after_s="60",
    )


def _file(file_id: str, found: Record) -> StoredFile:
    return StoredFile(
        file_id,
        found["name"].decode(),
        found["purpose"].decode(),
        int(found["bytes"]),
        int(found["pieces"]),
        int(found["created_ms"]),
        int(found["expires_ms"]),
    )
