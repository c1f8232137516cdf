"""What is done with files that there are: they are listed, given, and deleted. Another tenant's are not found."""

from collections.abc import AsyncIterator

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.api.batch_runs.paging import read_page
from services.gateway.api.batches.file_objects import file_object
from services.gateway.api.batches.schema import Deleted, FilePage
from services.gateway.decoding.bounds import text, wrong
from services.gateway.http.exchange import Exchange
from shared.errors import NotFound
from shared.queue.stores.file_store import KIND, FileStore, StoredFile

_PATH = "/v1/files/"
_USUAL, _MOST = 1000, 10_000
_LONGEST_PURPOSE = 64


class Files:
    """The handlers for files that exist."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/files: those of a caller, the newest first unless `order` is asc."""
        asked = read_page(exchange.query, _USUAL, _MOST)
        purpose = text("purpose", exchange.query("purpose"), _LONGEST_PURPOSE)
        found = await self._store.page(
            tenant_of(caller, ""),
            asked.after,
            asked.limit + 1,
            purpose,
            oldest_first=asked.oldest_first,
        )
        if found is None:
            raise wrong("after", f"must be the id of a file of yours, not {asked.after!r}")
        page = found[: asked.limit]
        await exchange.reply(
            FilePage(
                data=[file_object(file) for file in page],
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=len(found) > len(page),
            )
        )

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/files/{id}: what is known of a file."""
        await exchange.reply(file_object(await self._find(exchange, caller)))

    async def content(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/files/{id}/content: its bytes."""
        found = await self._find(exchange, caller, "/content")
        async with exchange.while_connected():
            await exchange.respond_in_pieces(self._pieces(found), b"application/octet-stream")

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        """DELETE /v1/files/{id}: removes it. Raises Conflict while a batch reads it."""
        found = await self._find(exchange, caller)
        await self._store.forget(found.id, tenant_of(caller, ""))
        await exchange.reply(Deleted(id=found.id))

    async def _find(self, exchange: Exchange, caller: Caller, behind: str = "") -> StoredFile:
        name = exchange.path.removeprefix(_PATH).removesuffix(behind)
        found = None
        if name.startswith(KIND):  # not those that batches have for themselves
            found = await self._store.find(name, tenant_of(caller, ""))
        if found is None:
            raise NotFound(
                "FILE_NOT_FOUND", f"there is no file {name[:64]!r} of yours", field="file_id"
            )
        return found

    async def _pieces(self, file: StoredFile) -> AsyncIterator[bytes]:
        for number in range(file.pieces):
            piece = await self._store.piece(file.id, number)
            if piece is None:
                raise NotFound("FILE_NOT_FOUND", f"{file.id} was deleted meanwhile")
            yield piece
