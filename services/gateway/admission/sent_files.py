"""Pictures that requests name by the id of a file of /v1/files: their bytes are read when a prompt is prepared."""

import contextlib
from collections.abc import AsyncIterator, Iterator

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.body_budget import BodyBudget
from services.gateway.reading.media.data_urls import InlineMedia, serialized
from services.gateway.reading.media.media import SENT_FILE
from shared.errors import InvalidRequest
from shared.queue.stores.file_store import FileStore, StoredFile
from tessera.preprocess.v1.preprocess_pb2 import Media, PrepareRequest

# What a file is sent for that requests may name.
SHOWN_PURPOSES = ("vision", "user_data")


class SentFiles:
    """Finds the files of callers. Another tenant's are not found."""

    def __init__(self, store: FileStore, budget: BodyBudget, most_bytes: int) -> None:
        """`budget` has the bytes too while a prompt is prepared; `most_bytes` of all files of one request."""
        self._store = store
        self._budget = budget
        self._most_bytes = most_bytes

    @contextlib.asynccontextmanager
    async def serialized(
        self, request: PrepareRequest, caller: Caller, inline: InlineMedia | None = None
    ) -> AsyncIterator[bytes]:
        """A prompt as it is sent, with bytes in the places of its data URLs and files; `inline` is then empty. Raises
        InvalidRequest naming the field, Unavailable.
        """
        named = dict(_named(request))
        found: dict[str, StoredFile] = {}
        size, field = 0, ""
        for file_id, field in named.items():
            file = found[file_id] = await self._find(file_id, field, tenant_of(caller, ""))
            size += file.bytes
            if size > self._most_bytes:
                raise self._too_large(field)
        self._budget.take(size)
        try:
            files = {name: await self._read(file, named[name]) for name, file in found.items()}
            prompt = await serialized(request, inline, files)
            files.clear()
            if named and len(prompt) > self._most_bytes:
                raise self._too_large(field)
            yield prompt
        finally:
            self._budget.give_back(size)

    def _too_large(self, field: str) -> InvalidRequest:
        return InvalidRequest(
            "INVALID_MEDIA",
            f"{field}: a request and its files may have {self._most_bytes} bytes together (--max-body-bytes): send"
            " smaller ones",
            field=field,
        )

    async def _find(self, file_id: str, field: str, tenant: str) -> StoredFile:
        found = await self._store.find(file_id, tenant)
        if found is None:
            raise _unknown(file_id, field)
        if found.purpose not in SHOWN_PURPOSES:
            raise InvalidRequest(
                "INVALID_MEDIA",
                f"{field} names a file of the purpose {found.purpose}: send it with {' or '.join(SHOWN_PURPOSES)}",
                field=field,
            )
        return found

    async def _read(self, file: StoredFile, field: str) -> bytes:
        pieces = [await self._store.piece(file.id, number) for number in range(file.pieces)]
        if None in pieces:  # it was deleted meanwhile
            raise _unknown(file.id, field)
        return b"".join(piece for piece in pieces if piece is not None)


def _named(request: PrepareRequest) -> Iterator[tuple[str, str]]:
    """The ids of files that a prompt names, each with the field."""
    for message in request.conversation.messages:
        for part in message.content:
            media: Media = part.media
            if media.url.startswith(SENT_FILE):
                yield media.url.removeprefix(SENT_FILE), media.field


def _unknown(file_id: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        "FILE_NOT_FOUND", f"{field}: there is no file {file_id[:64]!r} of yours", field=field
    )
