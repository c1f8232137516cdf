"""Resuming the answer to a request that is in the queue, or ended less than ten minutes ago: from any
event, at any gateway.
"""

import re
from collections.abc import Sequence

from services.gateway.admission.held_requests import HeldRequests
from services.gateway.following.answer import Answer
from services.gateway.following.choice_log import LogLayout
from services.gateway.following.event_id import check_progress, read_event_id
from services.gateway.following.follower import Follower
from services.gateway.model.served_model import ServedModel
from services.gateway.redis_calls import until_recovered
from services.gateway.reply_kinds import OF_PARTS
from services.gateway.telemetry.metrics.metrics import Metrics
from shared.environment import monotonic
from shared.errors import InvalidRequest, NotFound
from shared.queue import Queue, RequestState
from shared.queue.keys import model_tag
from shared.queue.token_log import decode_tokens
from shared.telemetry.timeline import Timelines
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, RequestSpec

_NAME = r"(r_([0-9a-f]{8})_[0-9a-f]{32})"


class Resumption:
    """Finds requests by their ids, and answers them from any event on."""

    def __init__(
        self,
        model: ServedModel,
        queue: Queue,
        follower: Follower,
        held_requests: HeldRequests,
        metrics: Metrics,
        timelines: Timelines,
        id_prefixes: Sequence[str] = (),
    ) -> None:
        """`id_prefixes` stand before a request's id in the ids of replies, which most clients keep instead."""
        prefix = "|".join(map(re.escape, id_prefixes))
        self._name = re.compile(f"(?:{prefix})?{_NAME}")
        self._model = model
        self._tag = model_tag(model.name)
        self._queue = queue
        self._follower = follower
        self._held_requests = held_requests
        self._metrics = metrics
        self._timelines = timelines

    async def find(self, request_id: str, tenant: str) -> RequestState:
        """The state of a request, by its id or by its answer's `id`. Raises NotFound, also for another
        tenant's.
        """
        state = None
        name = self._name.fullmatch(request_id)
        if name is not None and name[2] == self._tag:
            state = await self._queue.lookup(name[1], tenant)
            if state is None:
                await until_recovered(self._queue)
                state = await self._queue.lookup(name[1], tenant)
        if state is None:
            raise NotFound(
                "REQUEST_NOT_FOUND",
                f"there is no request {request_id[:64]!r} of yours; answers are kept for ten "
                "minutes after their end",
                field="request_id",
            )
        return state

    async def cancel(self, request_id: str, tenant: str) -> RequestState:
        """Cancels a request, whoever follows it. Raises NotFound."""
        found = await self.find(request_id, tenant)
        await self._queue.cancel(found.head.request_id, tenant)
        return await self.find(request_id, tenant)

    async def follow(self, request_id: str, tenant: str, after: str, field: str) -> Answer:
        """The rest of an answer after the event `after`, "" for all of it, written as the request
        asked for. The answer must be closed.

        Raises NotFound, or InvalidRequest naming `field`.
        """
        state = await self.find(request_id, tenant)
        if state.head.HasField("pooling"):
            raise InvalidRequest(
                "NO_STREAM",
                "request_id: this request's answer is a vector or a score, which has no stream: send it again",
                field="request_id",
            )
        return await self._answer(state, after, field, None)

    async def join(
        self, request_id: str, tenant: str, after: str, reply: ReplyFormat
    ) -> Answer | None:
        """The same for a client that sent its request again; `reply` decides whether its stream reports
        usage. None for a request that is not in the queue yet, or no more.
        """
        state = await self._queue.lookup(request_id, tenant)
        return None if state is None else await self._answer(state, after, "Last-Event-ID", reply)

    async def _answer(
        self, state: RequestState, after: str, field: str, reply: ReplyFormat | None
    ) -> Answer:
        head = state.head
        if reply is not None:
            head.reply.include_usage = reply.include_usage
            head.reply.continuous_usage = reply.continuous_usage
        progress = read_event_id(after, head.request_id, head.sampling.n, field)
        if progress.events_behind and head.reply.kind not in OF_PARTS:
            raise InvalidRequest(
                "INVALID_EVENT_ID",
                f"{field} names events that this answer does not have",
                field=field,
            )
        hidden = head.reply.prompt_only
        check_progress(
            progress,
            [0 if hidden else count for count in state.tokens],
            [ending is not None for ending in state.endings],
            0 if hidden else head.sampling.max_tokens,
            field,
        )
        self._model.forms.of(
            head.reply.message
        )  # before anything is begun for a form that is not known here
        layout = LogLayout.of(head, state.prompt_tokens)
        follow = self._follower.follow(head.request_id, new=False, layout=layout)
        self._metrics.resumed()
        try:
            if not all(state.endings):
                await self._held_requests.join(follow, head, state.arrived_ms)
        except BaseException:
            follow.close()
            raise
        return Answer(
            head,
            state.prompt_tokens,
            self._model.table,
            follow,
            self._metrics,
            own_eos_ids=self._model.own_eos_ids,
            forms=self._model.forms,
            prompt_ids=decode_tokens(head.prompt) if shows_prompt_ids(head) else None,
            arrived_at=monotonic(),
            leave=lambda: self._held_requests.leave(follow, head.tenant),
            progress=progress,
            timelines=self._timelines,
        )


def shows_prompt_ids(spec: RequestSpec) -> bool:
    """Whether the answer needs the ids of the prompt: to show them, or to name what it scores."""
    return spec.reply.return_token_ids or spec.sampling.HasField("prompt_logprobs")
