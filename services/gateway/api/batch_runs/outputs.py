"""The files that a batch writes, one or two: results are moved into them piece by piece, in the order of its lines."""

from dataclasses import dataclass, field

from shared.errors import Unavailable
from shared.queue.stores.batch_store import BatchStore, StoredBatch
from shared.queue.stores.file_store import PIECE_BYTES, FileStore

# The purpose of files that batches write.
OUTPUT = "batch_output"

# Results that are read at once, and that stand in one piece.
_AT_ONCE = 8
_MOST_LINES = 1000


@dataclass(slots=True)
class _Output:
    """One of the files."""

    file_id: str
    name: str
    pieces: int
    size: int = 0
    lines: list[int] = field(default_factory=list)
    waiting: list[bytes] = field(default_factory=list)

    def add(self, line: int, result: bytes) -> bool:
        """One more line. Returns whether there are enough for a piece."""
        self.lines.append(line)
        self.waiting += (result, b"\n")
        self.size += len(result) + 1
        return self.size >= PIECE_BYTES or len(self.lines) >= _MOST_LINES


class Outputs:
    """Writes the files of one batch. Whoever goes on with it begins behind the last piece."""

    def __init__(
        self, batches: BatchStore, files: FileStore, batch: StoredBatch, gateway: str
    ) -> None:
        self._batches = batches
        self._files = files
        self._batch = batch
        self._gateway = gateway
        self._completed = _Output(batch.output, f"{batch.id}_output.jsonl", batch.output_pieces)
        self._failed = self._completed
        if batch.errors != batch.output:
            self._failed = _Output(batch.errors, f"{batch.id}_error.jsonl", batch.error_pieces)

    async def write(self) -> None:
        """Moves all results, and makes the files whole. Raises Unavailable where the gateway does not lead it."""
        batch_id = self._batch.id
        lines = sorted(await self._batches.lines_with_results(batch_id))
        for start in range(0, len(lines), _AT_ONCE):
            some = lines[start : start + _AT_ONCE]
            for line, is_completed, result in await self._batches.results(batch_id, some):
                output = self._completed if is_completed else self._failed
                if output.add(line, result):
                    await self._move(output)
        outputs = [self._completed]
        if self._failed is not self._completed:
            outputs.append(self._failed)
        for output in outputs:
            if output.lines:
                await self._move(output)
            if output.pieces:
                await self._finish(output)

    async def _move(self, output: _Output) -> None:
        piece = b"".join(output.waiting)
        moved = await self._batches.move(
            self._batch.id, self._gateway, output.file_id, output.pieces, piece, output.lines
        )
        if not moved:
            raise lost(self._batch.id)
        output.pieces += 1
        output.size = 0
        output.lines.clear()
        output.waiting.clear()

    async def _finish(self, output: _Output) -> None:
        await self._files.finish(
            output.file_id,
            self._batch.tenant,
            self._batch.output_keep_ms,
            name=output.name,
            purpose=OUTPUT,
            pieces=output.pieces,
        )


def lost(batch_id: str) -> Unavailable:
    """The error of a gateway that does not lead a batch any more."""
    return Unavailable("BATCH_LOST", f"another gateway leads {batch_id}")
