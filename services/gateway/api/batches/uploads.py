"""POST /v1/files: a file that goes to Redis piece by piece while it comes."""

from collections.abc import AsyncIterator

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.sent_files import SHOWN_PURPOSES
from services.gateway.api.batch_runs.written_file import WrittenFile
from services.gateway.api.batches.file_objects import file_object
from services.gateway.api.batches.schema import UploadFields
from services.gateway.api.batches.upload_form import UploadForm
from services.gateway.api.parts import FileLimits
from services.gateway.body_budget import BodyBudget
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import convert
from services.gateway.errors import BodyTooLarge
from services.gateway.http.exchange import Exchange
from services.gateway.lasting_work import LastingWork
from services.gateway.slices import Slices
from shared.errors import Unavailable
from shared.queue.stores.file_store import PIECE_BYTES, FileStore, StoredFile, new_file_id

INPUT = "batch"
PURPOSES = (INPUT, *SHOWN_PURPOSES)
ANCHOR = "created_at"
SHORTEST_KEEP_S, LONGEST_KEEP_S = 3600, 30 * 86_400

# Beside the file: fields, headers and boundaries.
_FORM_BYTES = 1 << 20
# Of one upload, at most.
_HELD_BYTES = 2 * PIECE_BYTES
# Bytes that are read at once: less than a millisecond, and some for what is made of boundaries that are none.
_SLICE = 32 << 10


class Uploads:
    """The handler that takes files."""

    def __init__(
        self,
        store: FileStore,
        limits: FileLimits,
        budget: BodyBudget,
        slices: Slices,
        work: LastingWork,
    ) -> None:
        self._store = store
        self._budget = budget
        self._limits = limits
        self._slices = slices
        self._work = work

    async def upload(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/files: takes a file."""
        form = UploadForm(exchange.header("content-type"))
        self._budget.take(_HELD_BYTES)
        try:
            found = await self._take(exchange, form, tenant_of(caller, ""))
        finally:
            self._budget.give_back(_HELD_BYTES)
        await exchange.reply(file_object(found))

    async def _take(self, exchange: Exchange, form: UploadForm, tenant: str) -> StoredFile:
        file_id = new_file_id()
        written = WrittenFile(self._store, file_id)
        try:
            async for piece in self._slices_of(exchange):
                await written.add(form.feed(piece))
                if written.size > self._limits.most_bytes:
                    raise _too_large(self._limits.most_bytes)
            fields = convert(form.finish(), UploadFields)
            purpose = _purpose(fields.purpose, exchange)
            keep_ms = _keep_ms(fields, self._limits.keep_ms)
            pieces = await written.end()
            if not pieces:
                raise wrong("file", "is empty")
            there = await self._store.finish(
                file_id, tenant, keep_ms, name=form.filename, purpose=purpose, pieces=pieces
            )
            found = await self._store.find(file_id, tenant) if there else None
            if found is None:
                raise Unavailable("FILE_LOST", "Redis has lost the file: send it again")
        except BaseException:
            self._work.begin(self._store.forget(file_id, tenant))
            raise
        return found

    async def _slices_of(self, exchange: Exchange) -> AsyncIterator[bytes]:
        most = self._limits.most_bytes + _FORM_BYTES
        try:
            async for piece in exchange.body_pieces(most, self._limits.silence_s):
                for start in range(0, len(piece), _SLICE):
                    await self._slices.turn()
                    yield piece[start : start + _SLICE]
        except BodyTooLarge:
            raise _too_large(self._limits.most_bytes) from None


def _purpose(given: str | None, exchange: Exchange) -> str:
    """What a file is sent for; clients of Anthropic's API do not say it. Raises InvalidRequest."""
    purpose = given or ("user_data" if exchange.header("anthropic-version") else "")
    if purpose not in PURPOSES:
        raise wrong(
            "purpose",
            f"must be one of {', '.join(PURPOSES)}, not {purpose[:24]!r}: files are for /v1/batches, or pictures that"
            " requests name",
        )
    return purpose


def _keep_ms(fields: UploadFields, usual_ms: int) -> int:
    """For how long the fields of a form ask to keep its file. Raises InvalidRequest naming a field."""
    anchor, seconds = fields.anchor, fields.seconds
    if anchor is None and seconds is None:
        return usual_ms
    given = seconds or ""
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise wrong("expires_after[seconds]", f"must be a whole number, not {given[:24]!r}")
    return keep_of(anchor, int(given), "expires_after") * 1000


def keep_of(anchor: str | None, seconds: float | None, field: str) -> int:
    """Seconds that a file is kept, of both values of `field`. Raises InvalidRequest."""
    if anchor != ANCHOR:
        raise wrong(f"{field}[anchor]", f"must be {ANCHOR}, not {(anchor or '')[:24]!r}")
    if seconds is None or not SHORTEST_KEEP_S <= seconds <= LONGEST_KEEP_S:
        raise wrong(f"{field}[seconds]", f"must be between {SHORTEST_KEEP_S} and {LONGEST_KEEP_S}")
    return int(seconds)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        "FILE_TOO_LARGE",
        f"file is larger than the limit of {limit} bytes (--max-file-bytes): send it as several",
        field="file",
    )
