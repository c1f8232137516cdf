"""POST /v1/messages/batches: the requests of a body are kept as a file of their own, and a batch is made of it."""

import re
from collections.abc import Iterable
from functools import partial

from services.gateway.api.anthropic.batches.line_form import line_of
from services.gateway.api.anthropic.batches.schema import BatchItem, MessageBatchBody
from services.gateway.api.batch_runs.lines import MOST_LINES
from services.gateway.api.batch_runs.written_file import WrittenFile
from services.gateway.decoding.bounds import at_most, wrong
from services.gateway.decoding.decode import decode, in_thread
from services.gateway.lasting_work import LastingWork
from services.gateway.slices import Slices
from shared.errors import Unavailable
from shared.queue.stores.batch_store import MESSAGE_KIND, BatchStore, new_batch_id
from shared.queue.stores.file_store import INNER_KIND, PIECE_BYTES, FileStore, new_file_id

_ENDPOINT = "/v1/messages"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WINDOW, _WINDOW_MS = "24h", 24 * 3_600_000
# Requests that are written between two turns.
_AT_ONCE = 64


def read_items(body: bytes) -> list[BatchItem]:
    """The requests of a body. Raises InvalidRequest for what is wrong with the batch: not for what is wrong with the
    `params` of a request, which is its own result.
    """
    items = decode(body, MessageBatchBody).requests
    if not items:
        raise wrong("requests", "must hold at least one request")
    at_most("requests", len(items), MOST_LINES, "requests: send them as several batches")
    names: set[str] = set()
    for index, item in enumerate(items):
        field = f"requests[{index}].custom_id"
        if item.custom_id is None or not _NAME.fullmatch(item.custom_id):
            raise wrong(field, "must be 1 to 64 letters, digits, _ and -")
        if item.custom_id in names:
            raise wrong(
                field, f"{item.custom_id!r} is that of an earlier request", "DUPLICATE_CUSTOM_ID"
            )
        names.add(item.custom_id)
        if not bytes(item.params).startswith(b"{"):
            raise wrong(f"requests[{index}].params", "must be an object", "INVALID_TYPE")
    return items


class BatchCreation:
    """Makes batches."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        work: LastingWork,
        slices: Slices,
        keep_ms: int,
    ) -> None:
        """`keep_ms`: for how long a batch and its results are kept beyond its window."""
        self._batches = batches
        self._files = files
        self._work = work
        self._slices = slices
        self._keep_ms = keep_ms

    async def create(self, items: list[BatchItem], tenant: str) -> str:
        """Keeps the requests, and makes a batch of them. Returns its id. Raises Overloaded where there is no room."""
        batch_id, file_id = new_batch_id(MESSAGE_KIND), new_file_id(INNER_KIND)
        output = new_file_id(INNER_KIND)
        try:
            await self._write(file_id, items, tenant)
            fields: dict[str, str | bytes | int] = {
                "endpoint": _ENDPOINT,
                "window": _WINDOW,
                "metadata": b"",
                "output": output,
                "errors": output,
                "output_keep_ms": _WINDOW_MS + self._keep_ms,
                "total": len(items),
            }
            await self._batches.create(batch_id, tenant, file_id, _WINDOW_MS, self._keep_ms, fields)
        except BaseException:
            self._work.begin(self._files.forget(file_id, tenant))
            raise
        return batch_id

    async def _write(self, file_id: str, items: list[BatchItem], tenant: str) -> None:
        written = WrittenFile(self._files, file_id)
        for start in range(0, len(items), _AT_ONCE):
            await self._slices.turn()
            for line in await _lines(items[start : start + _AT_ONCE]):
                await written.add(line)
        pieces = await written.end()
        is_there = await self._files.finish(
            file_id, tenant, self._keep_ms, name=f"{file_id}.jsonl", purpose="batch", pieces=pieces
        )
        if not is_there:
            raise Unavailable("FILE_LOST", "Redis has lost the requests: send them again")


async def _lines(items: Iterable[BatchItem]) -> list[bytes]:
    work = partial(lambda some: [line_of(item) for item in some], items)
    size = sum(len(item.params) for item in items)
    return await in_thread(work) if size > PIECE_BYTES else work()
