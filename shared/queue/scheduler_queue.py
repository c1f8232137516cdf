"""The queue's verbs for schedulers: leases, ownership, the writing of the log."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shared.queue.base import Verbs, ending_or_none, pairs
from shared.queue.log_event import LogEventWriter
from shared.queue.messages import (
    MODEL_CHANGED,
    Append,
    AppendAnswer,
    AppendCode,
    Places,
    Renewal,
    TakenRequest,
)
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

_NONE_LOST: Mapping[str, int] = MappingProxyType({})
_MODEL_CHANGED = MODEL_CHANGED.SerializeToString()


class SchedulerVerbs(Verbs):
    """What schedulers do with the queue."""

    async def renew(
        self,
        scheduler_id: str,
        load: GetLoadResponse,
        *,
        register: bool,
        tokens_per_s: float | None,
        contents: Collection[str] = (),
    ) -> Renewal | None:
        """Renews the lease. `contents`: of the decoders that it has bound (`Hello.content` in hex): the newest of all
        schedulers' gets the new requests. None means that others have fenced this scheduler off: stop at once.

        While Redis recovers, a scheduler that it has lost comes back by this.
        """
        answer = await self._scripts.call(
            "renew",
            scheduler_id,
            self._lifetimes.lease_ms,
            int(register),
            load.SerializeToString(),
            "" if tokens_per_s is None else f"{tokens_per_s:.1f}",
            " ".join(sorted(contents)),
        )
        if answer[0] == b"GONE":
            return None
        others = {str(sid, "ascii"): float(deadline) for sid, deadline in pairs(answer[2:])}
        return Renewal(int(answer[1]), others)

    async def take(self, scheduler_id: str, places: Sequence[Places]) -> list[TakenRequest] | None:
        """Becomes the owner of the fairest waiting requests that decoders of the caller have places for. None means
        fenced off; empty also while Redis recovers.

        A request that has begun is taken for its content alone; new ones for that of the decoder that was loaded last,
        of those that are bound anywhere. The first of the places gets them as long as that is not known.
        """
        words = [word for p in places for word in (p.content, p.max_requests, p.max_tokens)]
        late_after_ms = self._lifetimes.late_after_ms
        answer = await self._scripts.call(
            "take", *self._closing, scheduler_id, late_after_ms, *words
        )
        if answer[0] == b"GONE":
            return None
        return [_taken(item) for item in answer[1:]]

    async def append(self, scheduler_id: str, appends: Sequence[Append]) -> list[AppendAnswer]:
        """Writes what one step gave, in one call and one message. Answers in the order given."""
        answers = [
            AppendAnswer(AppendCode.OK, a.start + len(a.records) // a.stride) for a in appends
        ]
        events = [
            LogEventWriter(a.request_id, a.choice, a.stride).event(
                a.start, a.records, a.ending, a.origin
            )
            for a in appends
        ]
        for index, answer in await self.append_events(scheduler_id, b"".join(events)):
            answers[index] = answer
        return answers

    async def append_events(
        self, scheduler_id: str, batch: bytes
    ) -> list[tuple[int, AppendAnswer]]:
        """The same for a serialized `LogBatch`. Returns only the events that were not simply appended, by index."""
        keep_s = self._lifetimes.keep_ended_s
        found = await self._scripts.call("append", scheduler_id, keep_s, batch)
        triples = zip(found[::3], found[1::3], found[2::3], strict=True)
        return [(i, AppendAnswer(AppendCode(code), int(length))) for i, code, length in triples]

    async def abandoned(self, request_ids: Sequence[str]) -> list[str]:
        """Those of the requests that are cancelled, or that no gateway follows any more. Call once a second."""
        if not request_ids:
            return []
        found = await self._scripts.call("abandoned", self._lifetimes.grace_ms, *request_ids)
        return [str(rid, "ascii") for rid in found]

    async def sweep(self) -> int:
        """Removes what dead processes have left and ends waiting requests whose time is up: how many. Once a second."""
        words = (self._lifetimes.same_content_ms, _MODEL_CHANGED)
        return int(await self._scripts.call("sweep", *self._closing, *words))

    async def owned(self, scheduler_id: str) -> list[str]:
        """The ids of the requests that this scheduler owns, according to Redis."""
        (found,) = await self._ask([("SMEMBERS", f"{self._keys.prefix}:own:{scheduler_id}")])
        return sorted(str(request_id, "ascii") for request_id in found)

    async def give_back(
        self,
        scheduler_id: str,
        request_ids: Sequence[str],
        lost_decoders: Mapping[str, int] = _NONE_LOST,
    ) -> int:
        """Puts requests back at the head of the queue with their logs. Returns how many were still owned.

        `lost_decoders`: how many decoders were lost while they computed each, where more than when it was taken.
        """
        words = [word for rid in request_ids for word in (rid, lost_decoders.get(rid, 0))]
        return int(await self._scripts.call("give_back", *self._closing, scheduler_id, *words))

    async def blame(self, request_ids: Sequence[str]) -> None:
        """Counts one more decoder that was lost while it computed these requests, whoever owns them now."""
        await self._scripts.call("blame", *request_ids)

    async def fence(self, dead_id: str, deadline_ms: float) -> int:
        """Removes a scheduler whose lease is over and frees its requests; -1 if the lease is not over."""
        return int(await self._scripts.call("fence", *self._closing, dead_id, repr(deadline_ms)))

    async def leave(self, scheduler_id: str) -> None:
        """An orderly end, after `give_back`. What is still owned goes back too."""
        await self._scripts.call("leave", *self._closing, scheduler_id)

    async def lease_decoder(self, decoder_id: str, scheduler_id: str) -> int:
        """Binds a decoder: returns the lease, or 0 if another live scheduler has it or Redis recovers."""
        return int(await self._scripts.call("lease_decoder", decoder_id, scheduler_id, ""))

    async def free_decoder(self, decoder_id: str, scheduler_id: str) -> None:
        """Releases a decoder."""
        await self._scripts.call("lease_decoder", decoder_id, "", scheduler_id)

    async def leases(self) -> dict[str, str]:
        """Which decoder is bound to which live scheduler."""
        flat = await self._scripts.call("leases")
        return {str(did, "ascii"): str(sid, "ascii") for did, sid in pairs(flat)}


def _taken(item: Sequence[Any]) -> TakenRequest:
    spec, own_at, arrived_ms, logs, prio, prompt_log, rank, attempts, lost_decoders, *origin = item
    content, numerics, inexact = origin
    return TakenRequest(
        spec=RequestSpec.FromString(spec),
        own_at=int(own_at),
        arrived_ms=int(arrived_ms),
        logs=tuple(logs[::2]),
        endings=tuple(map(ending_or_none, logs[1::2])),
        prio=prio.decode(),
        prompt_log=prompt_log,
        rank=int(rank),
        attempts=int(attempts),
        lost_decoders=int(lost_decoders),
        content=str(content, "ascii"),
        numerics=str(numerics, "ascii"),
        is_exact=inexact != b"1",
    )
