"""A file that goes to Redis piece by piece while it comes."""

from dataclasses import dataclass

from shared.queue.stores.file_store import PIECE_BYTES, FileStore


@dataclass(slots=True)
class WrittenFile:
    """A file on its way to Redis: less than two pieces of it are here."""

    store: FileStore
    file_id: str
    size: int = 0
    _pieces: int = 0
    _waiting: bytearray | None = None

    async def add(self, data: bytes) -> None:
        """The next bytes. Raises Overloaded where there is no room."""
        waiting = self._waiting = self._waiting or bytearray()
        waiting += data
        self.size += len(data)
        if len(waiting) >= PIECE_BYTES:
            await self._write()

    async def end(self) -> int:
        """Writes the rest. Returns the number of pieces."""
        if self._waiting:
            await self._write()
        return self._pieces

    async def _write(self) -> None:
        data, self._waiting = bytes(self._waiting or b""), None
        await self.store.add(self.file_id, self._pieces, data)
        self._pieces += 1
