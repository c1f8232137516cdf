"""What the steps of one decoder mean for the timelines of requests: written at their events, never for each token."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import DecoderState
from services.scheduler.decoders.step_statistics import StepStatistics, StepSums
from shared.environment import monotonic
from shared.telemetry.timeline import Timelines
from tessera.decoder.v1.decoder_pb2 import StepTimes

if TYPE_CHECKING:
    from services.scheduler.output.request import Request


class StepTrace:
    """Follows the requests of one decoder from when it gets them to when it has them no more.

    A step costs it a comparison or two, unless prompts are computed in it or sequences are preempted.
    """

    def __init__(self, timelines: Timelines, replica: str, statistics: StepStatistics) -> None:
        """`replica` is the decoder's; `statistics` are those of its steps."""
        self._timelines = timelines
        self._replica = replica
        self._statistics = statistics
        self._here: set[str] = set()  # requests
        self._placed: dict[str, tuple[float, dict[str, Any]]] = {}
        self._prompts: dict[Sequence, None] = {}  # of which not all is computed
        self._generating: dict[
            str, tuple[float, StepSums, int]
        ] = {}  # since when, and with how many tokens
        self._preempted: dict[
            Sequence, tuple[float, bool]
        ] = {}  # since when, and whether it was swapped
        self._preemptions = 0  # that are known here

    def placed(self, request: "Request", state: DecoderState) -> None:
        """The decoder gets a request now."""
        self._here.add(request.request_id)
        self._placed[request.request_id] = (
            monotonic(),
            {
                "running": len(state.running),
                "waiting": len(state.waiting),
                "free_slots": len(state.slots.free),
                "free_blocks": state.blocks.num_free,
            },
        )

    def planned(self, plan: StepPlan | None, state: DecoderState) -> None:
        """A plan was made, or there was nothing to plan."""
        if state.preemptions != self._preemptions:
            self._note_preempted(state)
        if self._preempted:
            self._note_resumed()
        if plan is not None and plan.new:
            for _, sequence in plan.new:
                self._prompts[sequence] = None

    def answered(self, plan: StepPlan, began: float, ended: float, times: StepTimes) -> None:
        """A plan was answered; its step took from `began` to `ended`."""
        if self._prompts or plan.num_tokens > len(plan.row_slot):
            for row, sequence in enumerate(plan.row_sequence):
                if plan.row_count[row] > 1 or sequence in self._prompts:
                    self._note_prompt(plan, row, sequence, began, ended, times)

    def left(self, request: "Request", why: str = "") -> None:
        """The decoder has a request no more: it has ended, or goes on elsewhere, `why`."""
        rid, now = request.request_id, monotonic()
        if rid not in self._here:
            return
        self._here.discard(rid)
        placed = self._placed.pop(rid, None)
        if placed is not None:
            self._timelines.span(rid, "schedule", placed[0], now, **placed[1], begun=False)
        begun = self._generating.pop(rid, None)
        if begun is not None:
            since, sums, known = begun
            tokens = max(0, request.num_tokens - known)
            self._timelines.span(
                rid,
                "decode",
                since,
                now,
                service="decoder",
                replica=self._replica,
                tokens=tokens,
                **_means(self._statistics.sums() - sums),
                **_drafts(request.all_sequences),
            )
        for sequence in request.all_sequences:
            self._prompts.pop(sequence, None)
            preempted = self._preempted.pop(sequence, None)
            if preempted is not None:
                self._note_preemption(sequence, *preempted, now)
        if why:
            self._timelines.span(rid, "left_decoder", now, now, decoder=self._replica, why=why)

    def _note_prompt(
        self,
        plan: StepPlan,
        row: int,
        sequence: Sequence,
        began: float,
        ended: float,
        times: StepTimes,
    ) -> None:
        rid, start, count = sequence.request_id, plan.row_start[row], plan.row_count[row]
        if rid not in self._here or sequence.payload is None:  # it has ended, or moved, meanwhile
            self._prompts.pop(sequence, None)
            return
        request: Request = sequence.payload.request
        placed = self._placed.pop(rid, None)
        if placed is not None:
            since, found = placed
            self._timelines.span(rid, "schedule", since, max(since, began), **found)
        # The token that the row gave, if it is the last one, is among them already.
        is_last = start + count >= max(sequence.prompt_len, len(sequence.tokens) - 1)
        self._timelines.span(
            rid,
            "prefill",
            began,
            ended,
            service="decoder",
            replica=self._replica,
            tokens=count,
            start=start,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=sequence.num_cached_tokens,
            recomputed=rid in self._generating or request.was_resumed,
            step_tokens=plan.num_tokens,
            step_rows=len(plan.row_slot),
            **_times(times),
        )
        if is_last:
            self._prompts.pop(sequence, None)
            if rid not in self._generating and not sequence.pooled_width:
                known = max(0, request.num_tokens - 1) if request.was_resumed else 0
                self._generating[rid] = (ended, self._statistics.sums(), known)
                what = "go_on" if request.was_resumed else "first_token"
                self._timelines.span(
                    rid, what, ended, ended, service="decoder", replica=self._replica
                )

    def _note_preempted(self, state: DecoderState) -> None:
        self._preemptions = state.preemptions
        now = monotonic()
        for sequence in state.waiting:
            if sequence.num_preemptions and sequence not in self._preempted:
                self._preempted[sequence] = (now, bool(sequence.host_blocks))

    def _note_resumed(self) -> None:
        now = monotonic()
        for sequence, (since, swapped) in list(self._preempted.items()):
            if sequence.status is not SequenceStatus.WAITING:
                del self._preempted[sequence]
                self._note_preemption(sequence, since, swapped, now)
                if not swapped and not sequence.ended:
                    self._prompts[sequence] = None

    def _note_preemption(
        self, sequence: Sequence, since: float, swapped: bool, until: float
    ) -> None:
        if sequence.payload is not None:
            self._timelines.span(
                sequence.request_id,
                "preempted",
                since,
                until,
                service="decoder",
                replica=self._replica,
                choice=sequence.choice,
                swapped=swapped,
                tokens=len(sequence.tokens),
            )


def _drafts(sequences: Iterable[Sequence]) -> dict[str, int]:
    """How many drafts there were, and how many were right, where there were any."""
    counts = [(s.drafts_run, s.drafts_right) for s in sequences if s.drafts_run]
    run, right = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
    return {"drafts": run, "accepted_drafts": right} if run else {}


def _times(times: StepTimes) -> dict[str, Any]:
    return {
        "queue_us": times.queue_us,
        "prepare_us": times.prepare_us,
        "forward_us": times.forward_us,
        "sample_us": times.sample_us,
    }


def _means(sums: StepSums) -> dict[str, Any]:
    """What steps were like, in the mean."""
    steps = max(1, sums.steps)
    return {
        "steps": sums.steps,
        "step_us": round(1e6 * sums.step_s / steps),
        "queue_us": sums.queue_us // steps,
        "prepare_us": sums.prepare_us // steps,
        "forward_us": sums.forward_us // steps,
        "sample_us": sums.sample_us // steps,
        "step_tokens": round(sums.tokens / steps, 1),
    }
