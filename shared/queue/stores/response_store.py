"""What is kept of responses (OpenAI's Responses API) for those that go on with them: what each was asked, and, once it
has ended, the response. Requests and their logs are kept by the queue itself, and not as long.
"""

from dataclasses import dataclass

from redis.asyncio import Redis

from shared.errors import InvalidRequest
from shared.queue.keys import Keys
from shared.queue.recovery import RecoveryVerbs

_FIELDS = ("tenant", "previous", "input", "begun", "response")


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """One response. `previous` is the request of the one that it went on with, empty for none; `begun` is the response
    before it had any output, `response` that at its end, empty until then.
    """

    request_id: str
    tenant: str
    previous: str
    # All as JSON.
    input: bytes
    begun: bytes
    response: bytes = b""


class ResponseStore(RecoveryVerbs):
    """The responses of one model. All methods raise Unavailable when Redis is away or refuses to write."""

    def __init__(self, redis: Redis, keys: Keys, keep_ms: int, limit_bytes: int) -> None:
        """`keep_ms`: from when one was made, or last gone on with; 0 keeps none. `limit_bytes` of all together."""
        super().__init__(redis, keys)
        self.keep_ms = keep_ms
        self._limit_bytes = limit_bytes

    async def keep(self, new: KeptResponse) -> None:
        """Keeps one that has no output yet. May be called again. Raises InvalidRequest where it is too large."""
        fields = (
            "tenant",
            new.tenant,
            "previous",
            new.previous,
            "input",
            new.input,
            "begun",
            new.begun,
        )
        await self._keep(new.request_id, False, *fields)

    async def finish(self, request_id: str, response: bytes) -> bool:
        """Keeps a response that has ended, unless it is forgotten. Returns whether it is kept; False also for one that
        is too large.
        """
        try:
            return await self._keep(request_id, True, "response", response)
        except InvalidRequest:
            await self.forget(request_id)
            return False

    async def renew(self, request_id: str) -> None:
        """Keeps it as long as one that was made now."""
        await self._keep(request_id, True)

    async def find(self, request_id: str) -> KeptResponse | None:
        """What is kept of a response; None for nothing."""
        (found,) = await self._ask([("HMGET", self._keys.response(request_id), *_FIELDS)])
        tenant, previous, asked, begun, response = found
        if tenant is None:
            return None
        return KeptResponse(
            request_id, tenant.decode(), previous.decode(), asked, begun, response or b""
        )

    async def tenant(self, request_id: str) -> str | None:
        """Whose it is; None where nothing is kept of it."""
        (found,) = await self._ask([("HGET", self._keys.response(request_id), "tenant")])
        return None if found is None else str(found.decode())

    async def forget(self, request_id: str) -> bool:
        """Removes it. Returns whether there was anything."""
        return bool(await self._scripts.call("response_forget", request_id))

    async def unfinished(self, older_than_ms: int, most: int) -> list[str]:
        """Requests of at most so many responses that have not been finished for so long, the oldest first."""
        ((seconds, _),) = await self._ask([("TIME",)])
        latest = int(seconds) * 1000 - older_than_ms
        key = self._keys.open_responses
        (found,) = await self._ask([("ZRANGEBYSCORE", key, "-inf", latest, "LIMIT", 0, most)])
        return [str(rid, "ascii") for rid in found]

    async def _keep(self, request_id: str, must_be_there: bool, *fields: str | bytes) -> bool:
        answer = await self._scripts.call(
            "response_keep",
            request_id,
            self.keep_ms,
            self._limit_bytes,
            int(must_be_there),
            *fields,
        )
        if answer[0] == b"LARGE":
            raise InvalidRequest(
                "RESPONSE_TOO_LARGE",
                f"store cannot be true: input and response have more than {self._limit_bytes} bytes"
                " (--response-store-bytes); send `store: false`",
                field="store",
            )
        return bool(answer[0] == b"OK")
