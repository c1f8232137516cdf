"""The lines of a batch's file, read piece by piece."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import msgspec

from services.gateway.api.batch_forms import BatchForm, LineRequest
from services.gateway.decoding.decode import decode, in_thread, is_large, off_loop
from services.gateway.slices import Slices
from shared.errors import InvalidRequest, NotFound
from shared.queue.stores.batch_store import StoredBatch
from shared.queue.stores.file_store import FileStore

MOST_LINES = 50_000
# With empty ones.
_MOST_ENDS = 200_000
_LONGEST_NAME = 512  # characters of a custom_id
# Lines, and their bytes, that are given between two turns.
_AT_ONCE, _BYTES_AT_ONCE = 64, 64 << 10


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not empty, with its number from 1 on; None for one that is larger than a body may be."""

    number: int
    text: bytes | None


async def raw_lines(
    store: FileStore, file_id: str, pieces: int, most_bytes: int, slices: Slices
) -> AsyncIterator[RawLine]:
    """Yields the lines of a file. At most a piece and a line are held. Raises NotFound where the file is gone,
    InvalidRequest where it has too many lines.
    """
    number = given = size = lines_since = bytes_since = 0
    begun: list[bytes] = []
    for index in range(pieces):
        piece = await store.piece(file_id, index)
        if piece is None:
            raise NotFound("FILE_LOST", f"{file_id} is gone")
        at = 0
        # Not divided at once: a piece may have a million line ends.
        while (end := piece.find(b"\n", at)) >= 0:
            number += 1
            line = await _joined(begun, size, piece[at:end], most_bytes)
            at = end + 1
            begun, size = [], 0
            if line is None or line.strip():
                given += 1
                yield RawLine(number, line)
            if given > MOST_LINES or number > _MOST_ENDS:
                raise InvalidRequest(
                    "TOO_MANY_LINES",
                    f"a batch has at most {MOST_LINES} lines: send it as several",
                    field="input_file_id",
                )
            lines_since, bytes_since = lines_since + 1, bytes_since + len(line or b"")
            if lines_since >= _AT_ONCE or bytes_since >= _BYTES_AT_ONCE:
                lines_since = bytes_since = 0
                await slices.turn()
        size += len(piece) - at
        if size <= most_bytes:
            begun.append(piece[at:])
    line = await _joined(begun, size, b"", most_bytes)
    if line is None or line.strip():
        yield RawLine(number + 1, line)


async def _joined(begun: list[bytes], size: int, end: bytes, most_bytes: int) -> bytes | None:
    size += len(end)
    if size > most_bytes:
        return None
    join = partial(b"".join, [*begun, end])
    return await in_thread(join) if is_large(size) else join()


async def read_line(
    raw: RawLine, form: BatchForm, batch: StoredBatch, most_bytes: int
) -> LineRequest:
    """The request of a line. Raises InvalidRequest naming the field."""
    if raw.text is None:
        raise InvalidRequest(
            "LINE_TOO_LARGE", f"the line is larger than the limit of {most_bytes} bytes"
        )
    return await off_loop(partial(form.read, batch=batch), raw.text)


async def custom_id_of(raw: RawLine) -> str | None:
    """The name that a line gives itself, whatever else is wrong with it."""
    if raw.text is None:
        return None
    try:
        found = (await off_loop(partial(decode, kind=_Named), raw.text)).custom_id
    except InvalidRequest:
        return None
    return found if found is None or len(found) <= _LONGEST_NAME else None


class _Named(msgspec.Struct):
    custom_id: str | None = None
