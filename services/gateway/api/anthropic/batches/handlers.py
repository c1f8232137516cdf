"""The handlers of /v1/messages/batches. Another tenant's are not found."""

from collections.abc import AsyncIterator

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.api.anthropic.batches.batch_objects import PATH, has_ended, message_batch
from services.gateway.api.anthropic.batches.creation import BatchCreation, read_items
from services.gateway.api.anthropic.batches.schema import DeletedMessageBatch, MessageBatchPage
from services.gateway.api.anthropic.version import check_version
from services.gateway.api.batch_forms import BatchForms
from services.gateway.api.batch_runs.paging import read_page
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import off_loop
from services.gateway.http.exchange import BodyLimits, Exchange
from shared.errors import InvalidRequest, NotFound
from shared.queue.stores.batch_store import MESSAGE_KIND, BatchStore, StoredBatch, kind_of
from shared.queue.stores.file_store import FileStore, StoredFile

_USUAL, _MOST = 20, 1000
_RESULTS = b"application/x-jsonl"


class MessageBatches:
    """Makes batches, tells of them, gives their results, and ends and removes them."""

    def __init__(
        self,
        creation: BatchCreation,
        batches: BatchStore,
        files: FileStore,
        forms: BatchForms,
        limits: BodyLimits,
    ) -> None:
        self._creation = creation
        self._batches = batches
        self._files = files
        self._forms = forms
        self._limits = limits

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/messages/batches: answers many requests, each as /v1/messages does."""
        check_version(exchange)
        body = await exchange.json_body(self._limits)
        items = await off_loop(read_items, body)
        del body
        tenant = tenant_of(caller, "")
        batch_id = await self._creation.create(items, tenant)
        items.clear()
        exchange.release_body()
        self._forms.woken.set()
        await exchange.reply(message_batch(await self._find(batch_id, tenant)))

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/messages/batches: those of a caller, the newest first."""
        check_version(exchange)
        before, after = exchange.query("before_id"), exchange.query("after_id")
        if before and after:
            raise wrong("before_id", "and after_id exclude each other: send one of them")
        field = "before_id" if before else "after_id"
        asked = read_page(exchange.query, _USUAL, _MOST, field)
        found = await self._batches.page(
            MESSAGE_KIND,
            tenant_of(caller, ""),
            asked.after,
            asked.limit + 1,
            oldest_first=bool(before),
        )
        if found is None:
            raise wrong(field, f"must be the id of a batch of yours, not {asked.after!r}")
        page = found[: asked.limit]
        if before:
            page.reverse()
        await exchange.reply(
            MessageBatchPage(
                data=[message_batch(batch) for batch in page],
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=len(found) > len(page),
            )
        )

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/messages/batches/{id}: how far it is."""
        check_version(exchange)
        found = await self._find(_name(exchange), tenant_of(caller, ""))
        await exchange.reply(message_batch(found))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/messages/batches/{id}/cancel: ends it. One that has ended, or is about to, stays as it is."""
        check_version(exchange)
        batch_id, tenant = _name(exchange, "/cancel"), tenant_of(caller, "")
        await self._find(batch_id, tenant)
        await self._batches.cancel(batch_id, tenant)
        self._forms.woken.set()
        await exchange.reply(message_batch(await self._find(batch_id, tenant)))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        """DELETE /v1/messages/batches/{id}: removes it with its results, once it has ended."""
        check_version(exchange)
        tenant = tenant_of(caller, "")
        found = await self._find(_name(exchange), tenant)
        done = await self._batches.forget(found.id, tenant, [found.input, found.output])
        if done == "open":
            raise InvalidRequest(
                "BATCH_NOT_ENDED", f"{found.id} has not ended: cancel it first, or wait for its end"
            )
        await exchange.reply(DeletedMessageBatch(id=found.id))

    async def results(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/messages/batches/{id}/results: a line for each request, in their order."""
        check_version(exchange)
        tenant = tenant_of(caller, "")
        batch = await self._find(_name(exchange, "/results"), tenant)
        if not has_ended(batch):
            raise NotFound("BATCH_NOT_ENDED", f"{batch.id} has not ended: there are no results yet")
        file = await self._files.find(batch.output, tenant)
        if file is None:
            why = batch.problems.decode(errors="replace")[:500] or "they are gone"
            raise NotFound("RESULTS_LOST", f"{batch.id} has no results: {why}")
        async with exchange.while_connected():
            await exchange.respond_in_pieces(self._pieces(file), _RESULTS)

    async def _pieces(self, file: StoredFile) -> AsyncIterator[bytes]:
        for number in range(file.pieces):
            piece = await self._files.piece(file.id, number)
            if piece is None:
                raise NotFound("RESULTS_LOST", "the batch was deleted meanwhile")
            yield piece

    async def _find(self, batch_id: str, tenant: str) -> StoredBatch:
        found = None
        if kind_of(batch_id) == MESSAGE_KIND:
            found = await self._batches.find(batch_id, tenant)
        if found is None:
            shown = batch_id[:64]
            raise NotFound("BATCH_NOT_FOUND", f"there is no message batch {shown!r} of yours")
        return found


def _name(exchange: Exchange, behind: str = "") -> str:
    return exchange.path.removeprefix(f"{PATH}/").removesuffix(behind)
