"""The responses that are kept: any gateway gives one, goes on with it, and finishes it when its answer has ended."""

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.admission.resume import Resumption
from services.gateway.api.compact_json import compact
from services.gateway.api.responses.errors import failure_value
from services.gateway.api.responses.events import ended_response
from services.gateway.api.responses.response import (
    COMPLETED,
    ID_PREFIX,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    response_object,
    written,
)
from services.gateway.following.answer import Answer
from services.gateway.lasting_work import LastingWork
from shared.errors import Cancelled, InvalidRequest, NotFound, ServingError, Unavailable
from shared.queue.stores.response_store import KeptResponse, ResponseStore

_NAME = re.compile(rf"(?:{ID_PREFIX})?(r_[0-9a-f]{{8}}_[0-9a-f]{{32}})")
_LONGEST_CHAIN = 1024
_MOST_AT_ONCE = 1000
# Until a request that was cancelled has ended.
_CANCEL_S = 5.0
# Larger ones are not kept again where Redis has lost its last writes.
_LARGE = 256 << 10


class KeptResponses:
    """Beside each record stands its request in the queue, which is forgotten earlier."""

    def __init__(
        self,
        store: ResponseStore,
        resumption: Resumption,
        work: LastingWork,
        sweep_s: float,
        most_bytes: int,
    ) -> None:
        """`most_bytes` of a conversation that is gone on with."""
        self._store = store
        self._resumption = resumption
        self._work = work
        self._sweep_s = sweep_s
        self._most_bytes = most_bytes
        # Those that have been made here and have not ended.
        self._held: dict[str, KeptResponse] = {}
        if self.is_on:
            work.keep_up("finishing responses", self._finish_ended)
            work.keep_up("keeping responses again", self._keep_again)

    @property
    def is_on(self) -> bool:
        """Whether responses are kept at all."""
        return self._store.keep_ms > 0

    @property
    def keep_ms(self) -> int:
        """For how long."""
        return self._store.keep_ms

    async def find(self, response_id: str, tenant: str, field: str = "response_id") -> KeptResponse:
        """A response of a tenant's. Raises NotFound naming `field`."""
        name = _NAME.fullmatch(response_id)
        found = await self._store.find(name[1]) if name is not None else None
        if found is None or found.tenant != tenant:
            raise NotFound(
                "RESPONSE_NOT_FOUND",
                f"there is no response {response_id[:64]!r} of yours; they are kept for"
                f" {self._store.keep_ms / 3_600_000:g} hours (--response-keep), unless `store` is false",
                field=field,
            )
        return found

    async def earlier(self, response_id: str, tenant: str) -> Sequence[tuple[bytes, bytes]]:
        """What was asked and answered until then, from the beginning, each as JSON; kept anew from now on. Raises
        InvalidRequest naming `previous_response_id`.
        """
        field = "previous_response_id"
        chain: list[tuple[bytes, bytes]] = []
        names: list[str] = []
        size, name = 0, response_id
        while name:
            try:
                found = await self.find(name, tenant, field)
            except NotFound as error:
                behind = "" if not names else f"it goes on with {name[:64]!r}: "
                text = f"{field}: {behind}{error.message}"
                raise InvalidRequest("PREVIOUS_RESPONSE_NOT_FOUND", text, field=field) from None
            response = await self.now(found)
            status = json.loads(response)["status"]
            if status not in (COMPLETED, INCOMPLETE):
                raise InvalidRequest(
                    "PREVIOUS_RESPONSE_NOT_ENDED", f"{field}: the response is {status}", field=field
                )
            chain.append((found.input, response))
            names.append(found.request_id)
            size += len(found.input) + len(response)
            if size > self._most_bytes or len(chain) > _LONGEST_CHAIN:
                raise InvalidRequest(
                    "CONVERSATION_TOO_LONG",
                    f"{field}: the conversation has more than {self._most_bytes} bytes (--max-body-bytes) or"
                    f" {_LONGEST_CHAIN} responses",
                    field=field,
                )
            name = found.previous
        await asyncio.gather(*map(self._store.renew, names))
        return chain[::-1]

    async def keep(self, answer: Answer, asked: bytes, previous: str) -> None:
        """Keeps the response to an answer that has begun. Raises InvalidRequest where it is too large."""
        head = answer.head
        begun = compact(response_object(head, IN_PROGRESS)).encode()
        name = _NAME.fullmatch(previous)
        before = name[1] if name is not None else ""
        new = KeptResponse(head.request_id, head.tenant, before, asked or b"null", begun)
        await self._store.keep(new)
        if len(asked) + len(begun) <= _LARGE:
            self._held[head.request_id] = new

    def drop(self, request_id: str, tenant: str) -> None:
        """Ends a request of which nothing is kept, whoever leaves."""
        self._work.begin(self._cancel(request_id, tenant))

    def release(self, request_id: str) -> None:
        """Its answer here is closed."""
        self._held.pop(request_id, None)

    def finish_later(self, request_id: str, response: Mapping[str, Any]) -> None:
        """Keeps a response that has ended, when its client has it."""
        content = "".join(written(response)).encode()
        self._work.begin(self._finish(request_id, content))

    def take_over(self, answer: Answer) -> None:
        """Reads it to its end in the place of its exchange, and keeps the response."""
        answer.outlives_exchange = True
        self._work.begin(self._finish_with(answer))

    def follow_to_its_end(self, request_id: str, tenant: str) -> None:
        """Beside its exchange: whoever leaves, the request goes on, and its response is kept at its end."""
        self._work.begin(self._folded(request_id, tenant))

    async def now(self, kept: KeptResponse) -> bytes:
        """The response as it is now, as JSON."""
        if kept.response:
            return kept.response
        try:
            state = await self._resumption.find(kept.request_id, kept.tenant)
        except NotFound:
            lost = {"code": "server_error", "message": "what was answered is lost: send it again"}
            content = compact(
                {**json.loads(kept.begun), "status": "failed", "error": lost}
            ).encode()
            await self._finish(kept.request_id, content)
            return content
        if all(state.endings):
            return await self._folded(kept.request_id, kept.tenant)
        status = QUEUED if state.state == "queued" else IN_PROGRESS
        return compact({**json.loads(kept.begun), "status": status}).encode()

    async def cancel(self, kept: KeptResponse) -> bytes:
        """Ends its request, if that has not ended, and gives the response."""
        if not kept.response:
            with contextlib.suppress(NotFound, TimeoutError):
                await self._resumption.cancel(kept.request_id, kept.tenant)
                async with asyncio.timeout(_CANCEL_S):
                    return await self._folded(kept.request_id, kept.tenant)
        return await self.now(kept)

    async def forget(self, kept: KeptResponse) -> None:
        """Ends its request and removes it."""
        if not kept.response:
            await self._cancel(kept.request_id, kept.tenant)
        self.release(kept.request_id)
        await self._store.forget(kept.request_id)

    async def _cancel(self, request_id: str, tenant: str) -> None:
        with contextlib.suppress(NotFound):
            await self._resumption.cancel(request_id, tenant)

    async def _folded(self, request_id: str, tenant: str) -> bytes:
        """The response at the end of its request, for which it waits; kept from then on."""
        answer = await self._resumption.follow(request_id, tenant, "", "response_id")
        return await self._finish_with(answer)

    async def _finish_with(self, answer: Answer) -> bytes:
        request_id = answer.head.request_id
        try:
            content = "".join(written(await _end(answer))).encode()
        finally:
            answer.close()
            self.release(request_id)
        await self._store.finish(request_id, content)
        return content

    async def _finish(self, request_id: str, content: bytes) -> None:
        self.release(request_id)
        await self._store.finish(request_id, content)

    async def _finish_ended(self) -> None:
        """Those whose gateway has died, or whose client has left: as long as the logs are there."""
        while True:
            await asyncio.sleep(self._sweep_s)
            with contextlib.suppress(Unavailable):
                age_ms = round(self._sweep_s * 1000)
                for request_id in await self._store.unfinished(age_ms, _MOST_AT_ONCE):
                    await self._finish_one(request_id)

    async def _finish_one(self, request_id: str) -> None:
        tenant = await self._store.tenant(request_id)
        if tenant is None:
            return
        try:
            state = await self._resumption.find(request_id, tenant)
        except NotFound:
            kept = await self._store.find(request_id)
            if kept is not None:
                await self.now(kept)
            return
        if all(state.endings):
            with contextlib.suppress(ServingError):
                await self._folded(request_id, tenant)

    async def _keep_again(self) -> None:
        """Where Redis came back without its last writes."""
        async for _ in self._store.recoveries():
            for kept in [*self._held.values()]:
                with contextlib.suppress(ServingError):
                    await self._store.keep(replace(kept, response=b""))


async def _end(answer: Answer) -> Mapping[str, Any]:
    """The response to an answer, once that has ended, however it does. Raises ServingError where that is not known."""
    try:
        [outcome] = await answer.whole()
    except ServingError as error:
        if not answer.broke_off:
            raise
        if isinstance(error, Cancelled):
            return response_object(answer.head, "cancelled")
        return response_object(answer.head, "failed", error=failure_value(error))
    return ended_response(answer, outcome)
