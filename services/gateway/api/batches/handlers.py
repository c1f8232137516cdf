"""The handlers of /v1/batches. Another tenant's are not found."""

import re
from collections.abc import Mapping
from functools import partial

import msgspec

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.api.batch_forms import BatchForms
from services.gateway.api.batch_runs.paging import read_page
from services.gateway.api.batches.batch_objects import batch_object
from services.gateway.api.batches.schema import BatchPage, BatchRequest
from services.gateway.api.batches.uploads import keep_of
from services.gateway.decoding.bounds import text, wrong
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.http.inner_calls import InnerCalls
from shared.errors import NotFound
from shared.queue.stores.batch_store import (
    KIND,
    BatchStore,
    StoredBatch,
    kind_of,
    new_batch_id,
)
from shared.queue.stores.file_store import new_file_id

_PATH = "/v1/batches/"
_USUAL, _MOST = 20, 100
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S = 30 * 86_400
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_LONGEST_ENDPOINT = 128


class Batches:
    """Makes batches, tells of them, and asks for their end."""

    def __init__(
        self,
        store: BatchStore,
        forms: BatchForms,
        calls: InnerCalls,
        limits: BodyLimits,
        keep_ms: int,
    ) -> None:
        """`keep_ms`: for how long a batch is kept beyond its window, and its files unless it says otherwise."""
        self._store = store
        self._forms = forms
        self._calls = calls
        self._limits = limits
        self._keep_ms = keep_ms

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/batches: answers the requests in a file."""
        body = await exchange.json_body(self._limits)
        asked = await off_loop(partial(decode, kind=BatchRequest), body)
        tenant, batch_id = tenant_of(caller, ""), new_batch_id()
        if asked.input_file_id is None:
            raise wrong("input_file_id", "is missing: upload a file to /v1/files first")
        window = asked.completion_window or ""
        keep_ms = self._keep_ms
        if (after := asked.output_expires_after) is not None:
            keep_ms = keep_of(after.anchor, after.seconds, "output_expires_after") * 1000
        fields: dict[str, str | bytes | int] = {
            "endpoint": self._endpoint(asked.endpoint),
            "window": window,
            "metadata": _metadata(asked.metadata),
            "output": new_file_id(),
            "errors": new_file_id(),
            "output_keep_ms": keep_ms,
        }
        await self._store.create(
            batch_id, tenant, asked.input_file_id, _window_ms(window), self._keep_ms, fields
        )
        self._forms.woken.set()
        await self._reply(exchange, batch_id, tenant)

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/batches: those of a caller, the newest first."""
        asked = read_page(exchange.query, _USUAL, _MOST)
        if asked.oldest_first:
            raise wrong("order", "must be desc: batches are listed from the newest on")
        found = await self._store.page(KIND, tenant_of(caller, ""), asked.after, asked.limit + 1)
        if found is None:
            raise wrong("after", f"must be the id of a batch of yours, not {asked.after!r}")
        page = found[: asked.limit]
        await exchange.reply(
            BatchPage(
                data=[batch_object(batch) for batch in page],
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=len(found) > len(page),
            )
        )

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/batches/{id}: how far it is."""
        await self._reply(exchange, exchange.path.removeprefix(_PATH), tenant_of(caller, ""))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/batches/{id}/cancel: ends it. One that has ended, or is about to, stays as it is."""
        batch_id = exchange.path.removeprefix(_PATH).removesuffix("/cancel")
        tenant = tenant_of(caller, "")
        if kind_of(batch_id) == KIND:
            await self._store.cancel(batch_id, tenant)
        self._forms.woken.set()
        await self._reply(exchange, batch_id, tenant)

    async def _reply(self, exchange: Exchange, batch_id: str, tenant: str) -> None:
        found: StoredBatch | None = None
        if kind_of(batch_id) == KIND:
            found = await self._store.find(batch_id, tenant)
        if found is None:
            raise NotFound(
                "BATCH_NOT_FOUND", f"there is no batch {batch_id[:64]!r} of yours", field="batch_id"
            )
        await exchange.reply(batch_object(found))

    def _endpoint(self, given: str | None) -> str:
        paths = self._calls.paths
        if given is None or given not in paths:
            shown = text("endpoint", given, _LONGEST_ENDPOINT)
            raise wrong("endpoint", f"must be one of {', '.join(paths)}, not {shown!r}")
        return given


def _window_ms(given: str) -> int:
    """How long a batch may take. Raises InvalidRequest."""
    found = _WINDOW.fullmatch(given)
    seconds = int(found[1]) * _SECONDS[found[2]] if found is not None else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise wrong(
            "completion_window",
            f"must be a time such as 24h, with s, m, h or d, of at most 30d, not {given[:24]!r}",
        )
    return seconds * 1000


def _metadata(given: Mapping[str, str] | None) -> bytes:
    """As JSON; empty for none. Raises InvalidRequest."""
    if given is None:
        return b""
    if len(given) > _MOST_METADATA:
        raise wrong("metadata", f"must not hold more than {_MOST_METADATA} entries")
    for name, value in given.items():
        text("metadata", name, _LONGEST_KEY)
        text(f"metadata.{name[:_LONGEST_KEY]}", value, _LONGEST_VALUE)
    return msgspec.json.encode(given)
