"""The queue's verbs for gateways: reserve, admit and follow requests, read their logs."""

import json
from collections.abc import Mapping, Sequence

from shared.errors import Conflict, InvalidRequest, Overloaded
from shared.net.redis.connection import Word
from shared.queue import token_log
from shared.queue.base import Verbs, ending_or_none, key_digest, request_words
from shared.queue.messages import INTERACTIVE, PRIORITIES, LogDelta, RequestLog, RequestState
from shared.queue.registry import Load, Member, members_of
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

_STATE_FIELDS = (
    "head",
    "tenant",
    "state",
    "owner",
    "cancel",
    "arrived_ms",
    "taken_ms",
    "first_token_ms",
    "ended_ms",
    "prompt_tokens",
    "attempts",
    "content",
    "inexact",
)
_ORIGIN_FIELDS = ("content", "numerics", "inexact")


class GatewayVerbs(Verbs):
    """What gateways do with the queue."""

    async def reserve(
        self,
        request_id: str,
        *,
        cost: int,
        max_requests: int,
        max_tokens: int,
        tenant: str = "",
        prio: str = INTERACTIVE,
        queue_timeout_ms: int = 0,
        first_token_timeout_ms: int = 0,
        idempotency_key: str = "",
        fingerprint: bytes = b"",
    ) -> str:
        """Reserves `cost` tokens (an upper bound) for a request, before any media work.

        Returns the id to go on with: this one, or that of the request with the same idempotency key, if it is under
        way or has finished not long ago.
        Raises Overloaded with `retry_after_s` where a limit is reached, or where so many wait that it would probably
        not be begun, or not get its first token, within its own timeouts (0: it has none); Conflict if the key came
        with another body.
        """
        answer = await self._scripts.call(
            "reserve",
            request_id,
            cost,
            max_requests,
            max_tokens,
            self._lifetimes.reservation_ms,
            self._idem(tenant, key_digest(idempotency_key)),
            fingerprint,
            self._lifetimes.keep_ended_s,
            prio,
            tenant,
            queue_timeout_ms,
            first_token_timeout_ms,
        )
        match answer:
            case [b"OK"]:
                return request_id
            case [b"EXISTS", known]:
                return str(known, "ascii")
            case [b"CONFLICT", _]:
                raise Conflict(
                    "IDEMPOTENCY_KEY_REUSED",
                    "this Idempotency-Key came with another request body; use a new key",
                )
            case [b"FULL", which, seconds]:
                limit = max_requests if which == b"requests" else max_tokens
                raise Overloaded(
                    "QUEUE_FULL",
                    f"the queue is full ({which.decode()}: limit {limit}); retry after {int(seconds)} s",
                    retry_after_s=str(int(seconds)),
                )
            case [b"LATE", timeout, takes, seconds]:
                name = timeout.decode()
                allowed = queue_timeout_ms if name == "queue_timeout" else first_token_timeout_ms
                what = "be begun" if name == "queue_timeout" else "get its first token"
                raise Overloaded(
                    "QUEUE_TOO_LONG",
                    f"so many requests wait that this one may {what} only after {int(takes)} s, and its {name} is "
                    f"{allowed / 1000:g} s; retry after {int(seconds)} s, or allow more time",
                    retry_after_s=str(int(seconds)),
                )
        raise AssertionError(answer)

    async def withdraw(
        self, request_id: str, *, tenant: str = "", idempotency_key: str = ""
    ) -> None:
        """Gives a reservation back: preparing failed, or the client left before admission."""
        idem = self._idem(tenant, key_digest(idempotency_key))
        await self._scripts.call("withdraw", request_id, idem)

    async def admit(
        self,
        spec: RequestSpec,
        *,
        cost: int,
        prio: str = INTERACTIVE,
        advance_us: int = 0,
        idempotency_key: str = "",
        fingerprint: bytes = b"",
        follow_ms: int = 30_000,
    ) -> int:
        """Accepts a prepared request: from now on it ends exactly once, whatever dies.

        `cost` is its exact number of tokens (prompt and the most it may generate), `prio` "interactive" or "batch",
        `advance_us` moves it ahead of those that came that much earlier, `follow_ms` is how long it lives on unless
        `follow` is called (0: for ever). Returns the arrival (ms, Redis TIME).
        The key's digest and the fingerprint go into the spec, so that any holder of the spec can put them back.
        Raises Conflict with the `request_id` of another request that was admitted with the same idempotency key
        after this one's reservation had run out: follow that one.
        """
        if prio not in PRIORITIES:
            raise InvalidRequest(
                "UNKNOWN_PRIORITY",
                f"prio: {prio!r} is none of {', '.join(PRIORITIES)}",
                field="prio",
            )
        if idempotency_key:
            spec.idempotency = key_digest(idempotency_key)
            spec.fingerprint = fingerprint
        idem = self._idem(spec.tenant, spec.idempotency)
        words = request_words(spec, idem=idem, prio=prio, cost=cost, follow_ms=follow_ms)
        answer = await self._scripts.call("admit", *self._closing, *words, advance_us)
        if answer[0] == b"EXISTS":
            raise Conflict(
                "IDEMPOTENCY_KEY_TAKEN",
                "a request with the same Idempotency-Key was accepted meanwhile; retry to get its answer",
                request_id=str(answer[1], "ascii"),
            )
        return int(answer[1])

    async def follow(self, requests: Mapping[str, int]) -> None:
        """Renews requests as followed: id -> milliseconds that each lives on without another call.

        Of two followers, the longer time counts. One round trip; call it every 5 s.
        """
        if requests:
            flat = [word for pair in requests.items() for word in pair]
            await self._scripts.call("follow", *flat)

    async def expire(self, request_ids: Sequence[str]) -> list[str]:
        """Ends those that wait and have a timeout that has passed, or no follower for too long.

        The script checks that itself; anyone may call it. Returns those ended.
        """
        if not request_ids:
            return []
        ended = await self._scripts.call("expire", *self._closing, *request_ids)
        return [str(rid, "ascii") for rid in ended]

    async def join(self, request_id: str) -> None:
        """Notes that a second gateway follows a request: `cancel(unless_joined=True)` leaves it alone from now on."""
        await self._scripts.call("join", request_id)

    async def cancel(
        self, request_id: str, tenant: str = "", *, unless_joined: bool = False
    ) -> str:
        """Cancels: "CANCELLED" if it was waiting, "FLAGGED" if its owner must, "ENDED", "UNKNOWN" or "FOLLOWED"."""
        words = (request_id, tenant, int(unless_joined))
        return str(await self._scripts.call("cancel", *self._closing, *words), "ascii")

    async def read(
        self, request_id: str, choices: int, *, after: Sequence[int] | None = None, stride: int = 4
    ) -> RequestLog | None:
        """Reads log and endings, each choice's records from index `after` on. None if there is no such request."""
        fields = ["head", "state", "prompt_tokens", "arrived_ms"]
        fields += [f"e{choice}" for choice in range(choices)]
        commands: list[tuple[Word, ...]] = [("HMGET", self._keys.request(request_id), *fields)]
        for choice in range(choices):
            start = stride * (after[choice] if after else 0)
            commands.append(("GETRANGE", self._keys.log(request_id, choice), start, -1))
        found, *records = await self._ask(commands)
        head, state, prompt_tokens, arrived_ms, *endings = found
        if state is None:
            return None
        return RequestLog(
            head=RequestSpec.FromString(head),
            state=state.decode(),
            prompt_tokens=int(prompt_tokens),
            arrived_ms=int(arrived_ms),
            records=tuple(records),
            endings=tuple(map(ending_or_none, endings)),
        )

    async def read_deltas(
        self, wanted: Sequence[tuple[str, int, int]], *, stride: int = 4
    ) -> list[LogDelta | None]:
        """Reads many choices in one round trip, each given as (request id, choice, index to read from).

        None where there is no such request. The ending is read before the log, so a log with an ending is whole; what
        is said of where records come from is read after them, so it holds for all of them.
        """
        commands: list[tuple[Word, ...]] = []
        for request_id, choice, after in wanted:
            commands += (
                ("HMGET", self._keys.request(request_id), "state", f"e{choice}"),
                ("GETRANGE", self._keys.log(request_id, choice), stride * after, -1),
                ("HMGET", self._keys.request(request_id), *_ORIGIN_FIELDS),
            )
        found = await self._ask(commands)
        threes = zip(found[::3], found[1::3], found[2::3], strict=True)
        return [
            LogDelta(
                records,
                ending_or_none(ending),
                str(content or b"", "ascii"),
                str(numerics or b"", "ascii"),
                inexact != b"1",
            )
            if state
            else None
            for (state, ending), records, (content, numerics, inexact) in threes
        ]

    async def spec(self, request_id: str) -> RequestSpec | None:
        """The whole spec of a request that has not ended; None for any other. A gateway that resumes keeps it."""
        (data,) = await self._ask([("HGET", self._keys.request(request_id), "spec")])
        return RequestSpec.FromString(data) if data else None

    async def lookup(self, request_id: str, tenant: str) -> RequestState | None:
        """Where a request stands, and its timeline. None if there is no such request, or it is another tenant's."""
        (found,) = await self._ask([("HMGET", self._keys.request(request_id), *_STATE_FIELDS)])
        fields = dict(zip(_STATE_FIELDS, found, strict=True))
        if fields["state"] is None or fields["tenant"].decode() != tenant:
            return None
        head = RequestSpec.FromString(fields["head"])
        choices = range(head.sampling.n)
        endings, *lengths = await self._ask(
            [
                ("HMGET", self._keys.request(request_id), *(f"e{choice}" for choice in choices)),
                *(("STRLEN", self._keys.log(request_id, choice)) for choice in choices),
            ]
        )
        sampling = head.sampling
        stride = token_log.stride(sampling.logprobs if sampling.HasField("logprobs") else None)
        return RequestState(
            head=head,
            state=fields["state"].decode(),
            owner=fields["owner"].decode(),
            arrived_ms=int(fields["arrived_ms"]),
            taken_ms=int(fields["taken_ms"]),
            first_token_ms=int(fields["first_token_ms"] or 0),
            ended_ms=int(fields["ended_ms"] or 0),
            prompt_tokens=int(fields["prompt_tokens"]),
            tokens=tuple(length // stride for length in lengths),
            endings=tuple(map(ending_or_none, endings)),
            cancel=fields["cancel"] == b"1",
            attempts=int(fields["attempts"]),
            content=str(fields["content"] or b"", "ascii"),
            is_exact=fields["inexact"] != b"1",
        )

    async def loads(self) -> list[GetLoadResponse]:
        """What the live schedulers hold, as of their last renewal."""
        (loads,) = await self._ask([("HVALS", self._keys.load)])
        return [GetLoadResponse.FromString(load) for load in loads]

    async def parts(self) -> dict[str, dict[str, object]]:
        """What the services say of the parts of the model, by service (`ServedPart.content`)."""
        (found,) = await self._ask([("HGETALL", self._keys.parts)])
        return {str(service, "ascii"): json.loads(said) for service, said in found.items()}

    async def members(self, service: str) -> list[Member]:
        """The live processes of a service, in order of their ids."""
        return members_of(await self._scripts.call("members", service))

    async def service_loads(self, service: str) -> dict[str, Load]:
        """What processes of a service said last of what they do, by their ids; of dead ones too, for a while."""
        (found,) = await self._ask([("HGETALL", self._keys.loads(service))])
        return {str(name, "ascii"): json.loads(load) for name, load in found.items()}

    async def depth(self) -> tuple[int, int]:
        """Requests reserved, waiting or running, and the tokens they may cost in all."""
        commands = [("HLEN", self._keys.live), ("HGET", self._keys.meta, "live_tokens")]
        requests, tokens = await self._ask([*commands])
        return int(requests), int(tokens or 0)

    async def queue_age(self) -> tuple[int, float]:
        """Requests that are admitted and that no scheduler has taken, and for how many seconds the oldest has been
        there: since it arrived; 0 for none. A request that was given back counts from its arrival too."""
        waiting, age_us = await self._scripts.call("queue_age")
        return int(waiting), int(age_us) / 1e6

    async def stored(self) -> tuple[int, int]:
        """Bytes of all files and batches, and batches that have not ended."""
        commands = [("GET", self._keys.stored_bytes), ("ZCARD", self._keys.open_batches)]
        size, batches = await self._ask([*commands])
        return int(size or 0), int(batches)

    async def report(
        self, gateway_id: str, lease_ms: int, decoder_ids: Sequence[str] = ()
    ) -> list[int] | None:
        """Takes or renews the lease of the one gateway that reports the system's metrics; 0 ms gives it up.

        Returns a number for each decoder, kept as long as the decoder is named; None while another gateway reports.
        """
        answer, *numbers = await self._scripts.call("report", gateway_id, lease_ms, *decoder_ids)
        return [int(number) for number in numbers] if answer == b"YES" else None

    async def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets what share tenants get against each other; those not named have 1. Replaces what was set before.

        Raises ValueError for a weight that is not above 0.
        """
        if any(not 0 < weight < float("inf") for weight in weights.values()):
            raise ValueError("a weight is a number above 0")
        flat = [word for pair in weights.items() for word in pair]
        commands: list[tuple[Word, ...]] = [("MULTI",), ("DEL", self._keys.weights)]
        if flat:
            commands.append(("HSET", self._keys.weights, *flat))
        await self._ask([*commands, ("EXEC",)])
