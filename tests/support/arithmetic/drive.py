"""The scheduler's core against the arithmetic decoder, called directly, with plans one ahead."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from services.decoder.steps import needs
from services.decoder.worker.plans.plan import Limits, Plan, read_plan
from services.scheduler.core.beams import BeamSearch, Hypothesis
from services.scheduler.core.blocks import root_of
from services.scheduler.core.budget import AttentionKind, Capacity, Parts
from services.scheduler.core.plan import Progress, StepOutput, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, MediaSpan, Sequence
from services.scheduler.decoders.convert import int32, output_of
from shared.errors import Internal
from shared.step_columns import PLAN_COLUMNS
from tessera.common.v1.media_pb2 import MediaItem
from tessera.common.v1.pooling_pb2 import PooledRows, PoolingHead, PoolingParams
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1 import decoder_pb2
from tests.support.arithmetic import model
from tests.support.arithmetic.model import MODEL, PLAIN_START, mix, picture_value, state_after
from tests.support.arithmetic.worker import NEVER, ArithmeticWorker, Step, columns


def with_pictures(tokens: list[int], media: Iterable[MediaSpan]) -> list[int]:
    """Tokens with the values of embedding rows in their places: the answer follows from these."""
    values = list(tokens)
    for span in media:
        values[span.offset : span.end] = [picture_value(span.digest, r) for r in range(span.length)]
    return values


def needs_of(limits: Capacity) -> needs.Needs:
    """What a decoder of this capacity needs, in the decoder's words."""
    kind = needs.AttentionKind[limits.parts.attention.name]
    return needs.Needs(kind, limits.parts.whole_prompt, limits.has_state)


def start_of(
    limits: Capacity, prompt: list[int], media: Iterable[MediaSpan] = (), salt: bytes = b""
) -> int:
    """The state before the first token of a prompt, on a decoder of this capacity."""
    wanted, media = needs_of(limits), tuple(media)
    digests = {span.offset: span.digest for span in media}
    root = model.root_of(wanted, salt, prompt, digests, limits.block_size)
    prefix = with_pictures(prompt, media) if model.has_prefix(wanted) else ()
    return model.first_state(root, prefix)


def search_alone(
    prompt: list[int], search: BeamSearch[Sequence], start: int = PLAIN_START
) -> list[Hypothesis]:
    """What a beam search finds when nothing disturbs it."""
    live = [sequence("alone", prompt, search.max_tokens)]
    search.live = live
    while not search.done:
        for beam in search.live:
            state = state_after(beam.tokens, start)
            search.answer(beam, MODEL.top(state, search.num_top))
        pairs = []
        for continuation in search.advance():
            beam = continuation.parent.fork(0)
            beam.tokens.append(continuation.step.token)
            pairs.append((beam, continuation))
        search.assign(pairs)
    return search.finished


class CheckedWorker(ArithmeticWorker):
    """Also compares all that a row's attention reads with what its tokens must have left there, and fails rows."""

    failing_rows: frozenset[int] = frozenset()  # of the next plan
    misread_rows: tuple[int, ...] = ()  # of the last plan: they read what is not of their tokens

    def run(self, plan: Plan) -> decoder_pb2.StepResult:
        """Applies a plan, computes its rows and checks them."""
        result = super().run(plan)
        rows = enumerate(columns(plan.row_slot, plan.row_start, plan.row_count))
        self.misread_rows = tuple(row for row, (s, *of) in rows if not self._reads_right(s, *of))
        return result

    def compute(self, row: int, step: Step) -> int | None:
        """As for every row, unless it is to fail."""
        if row in self.failing_rows and not self.slots.failed[step.rows[row][0]]:
            self.fail(row, Internal("NAN_LOGITS", "not a number"), step)
            return None
        return super().compute(row, step)

    def _reads_right(self, slot: int, start: int, count: int) -> bool:
        """Whether all tokens of a slot up to a row's end are in its blocks, as they were computed from each other. If
        not, no other row may use what the row has written."""
        if self.slots.failed[slot]:
            return True
        # What drafts that were not right have left behind is read by nobody.
        count = min(count, int(self.slots.computed[slot]) - start)
        size, table = self.limits.block_size, self.slots.table[slot].tolist()
        places = [(table[at // size], at % size) for at in range(start + count)]
        state = self.first_state(slot)
        for (block, place), value in zip(places, self.values(slot, 0, start + count), strict=True):
            state = mix(state, value)
            if self.content[block][place] != state:
                for written, index in places[start:]:
                    self.content[written][index] = NEVER
                return False
        return True


class DirectDecoder:
    """Takes the core's plans and gives its outputs, by way of the messages that a real decoder gets.

    A row that reads what was not computed of its own tokens fails the test, unless its result is discarded.
    """

    def __init__(self, capacity: Capacity, accuracy: float = 0.0) -> None:
        """accuracy: of drafts, where the capacity has some."""
        self.capacity = capacity
        self.limits = Limits(
            num_blocks=capacity.num_blocks,
            num_host_blocks=capacity.num_host_blocks,
            max_slots=capacity.max_slots,
            max_model_len=capacity.max_model_len,
            max_batched_tokens=capacity.max_batched_tokens,
            max_step_tokens=capacity.largest_step,
            block_size=capacity.block_size,
            num_encoder_blocks=capacity.num_encoder_blocks,
        )
        self.worker = CheckedWorker(
            self.limits,
            self._refuse,
            needs_of(capacity),
            accuracy=accuracy,
            max_drafts=capacity.max_drafts,
        )
        self.vectors: list[list[float]] = []  # of the last plan's pools

    def run(
        self,
        plan: StepPlan,
        restarted: Collection[Sequence] = (),
        failing_rows: Collection[int] = (),
    ) -> StepOutput:
        """Applies a plan, some of whose rows fail. What it computes of restarted sequences is discarded."""
        self._check_size(plan)
        self.worker.failing_rows = frozenset(failing_rows)
        result = self.worker.run(read_plan(self._message(plan), self.limits))
        self.vectors = [np.frombuffer(one, "<f4").tolist() for one in result.pooled]
        lost = {block for row in failing_rows for block in self._blocks(plan, row)}
        for row in self.worker.misread_rows:
            owner = plan.row_sequence[row]
            # The core restarts sequences that share blocks with a failed row when it has this result.
            assert owner.ended or owner in restarted or not lost.isdisjoint(self._blocks(plan, row))
        return output_of(plan, result)

    @staticmethod
    def _refuse(what: str) -> None:
        raise AssertionError(what)

    def _check_size(self, plan: StepPlan) -> None:
        """A step exceeds its budget only by one row, which must not be divided."""
        budget = self.capacity.max_batched_tokens
        assert plan.num_tokens == sum(plan.row_count) + sum(plan.row_drafts)
        if plan.num_tokens > budget:
            assert plan.num_tokens - max(plan.row_count) < budget

    def _blocks(self, plan: StepPlan, row: int) -> list[int]:
        slots, slot = self.worker.slots, plan.row_slot[row]
        blocks: list[int] = slots.table[slot, : slots.table_len[slot]].tolist()
        return blocks

    def _message(self, plan: StepPlan) -> decoder_pb2.StepPlan:
        message = decoder_pb2.StepPlan(
            lease=1,
            step=plan.step,
            new=[self._new_sequence(slot, new) for slot, new in plan.new],
            sealed_hashes=b"".join(plan.sealed_hashes),
        )
        for name in PLAN_COLUMNS:
            setattr(message, name, int32(getattr(plan, name)))
        return message

    def _new_sequence(self, slot: int, new: Sequence) -> decoder_pb2.NewSequence:
        sampling = SamplingParams(
            max_tokens=new.max_tokens, stop_token_ids=sorted(new.stop_token_ids)
        )
        if new.beams is not None:
            sampling.logprobs = new.beams.num_top
        return decoder_pb2.NewSequence(
            slot=slot,
            request_id=new.request_id,
            choice=new.choice,
            prompt_len=new.prompt_len,
            tokens=int32(new.tokens),
            media=[
                MediaItem(
                    digest=span.digest, offset=span.offset, length=span.length, rows=span.rows
                )
                for span in new.media
            ],
            sampling=sampling,
            pooling=_pooling(new) if new.pooled_width else None,
            root_name=root_of(new, self.capacity),
        )


def _pooling(new: Sequence) -> PoolingParams:
    """Of the hidden row itself."""
    rows = PooledRows.POOLED_ROWS_MEAN if new.reads_prompt else PooledRows.POOLED_ROWS_LAST
    return PoolingParams(rows=rows, head=PoolingHead.POOLING_HEAD_NONE, width=new.pooled_width)


def capacity(attention: AttentionKind = AttentionKind.CAUSAL, **changes: int) -> Capacity:
    whole_prompt = bool(changes.pop("whole_prompt", False))
    values: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_slots": 8,
        "max_model_len": 200,
        "max_batched_tokens": 32,
        "parts": Parts(attention, whole_prompt),
    }
    return Capacity(**{**values, **changes})


def sequence(
    name: str, prompt: list[int], max_tokens: int, arrival: int = 0, **more: object
) -> Sequence:
    return Sequence(name, list(prompt), len(prompt), max_tokens, arrival=arrival, **more)  # type: ignore[arg-type]


Name = tuple[str, int]


class Drive:
    """Runs scheduler and decoder with plans one ahead, collecting outputs and endings by request and choice."""

    def __init__(self, scheduler: Scheduler, accuracy: float = 0.0) -> None:
        """accuracy: of drafts, where the decoder has some: a step then takes 1 ms and 10 us for each token."""
        self.scheduler = scheduler
        self.decoder = DirectDecoder(scheduler.capacity, accuracy)
        self.steps = 0
        self.in_flight: list[StepPlan] = []
        self.outputs_of: dict[Name, list[int]] = defaultdict(list)
        self.endings_of: dict[Name, EndReason] = {}
        self.found: dict[str, list[Hypothesis]] = {}  # by beam searches
        self.vectors_of: dict[str, list[float]] = {}  # of prompts that are pooled
        self.fetches: list[bytes] = []  # artifacts that the decoder was told to pull

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Of the first choices."""
        return defaultdict(list, {n: o for (n, choice), o in self.outputs_of.items() if not choice})

    @property
    def endings(self) -> dict[str, EndReason]:
        """Of the first choices."""
        return {name: e for (name, choice), e in self.endings_of.items() if not choice}

    def send(self) -> bool:
        """Makes a plan, if there is one."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.in_flight.append(plan)
        self.fetches += plan.fetch
        return True

    def restarted(self) -> Collection[Sequence]:
        """Sequences that were restarted since the oldest plan in flight was made."""
        return self.scheduler.state.in_flight[0].restarted

    def answer(self, failing_rows: Collection[int] = ()) -> list[Progress]:
        """Has the oldest plan run; some of its rows fail."""
        plan = self.in_flight.pop(0)
        output = self.decoder.run(plan, self.restarted(), failing_rows)
        self.steps += 1
        if self.scheduler.lookahead is not None and plan.num_tokens:
            took = 1000 + 10 * (plan.num_tokens - sum(plan.row_drafts) + sum(output.drafted))
            self.scheduler.learn(plan, output, took)
        result = self.scheduler.complete(output)
        progress = list(result)
        vectors = self.decoder.vectors
        for p in progress:
            name = p.sequence.request_id, p.sequence.choice
            assert name not in self.endings_of
            if p.token is not None:
                assert p.start == len(self.outputs_of[name])
                assert p.token == self._expected(p)
                self.outputs_of[name].append(p.token)
            if p.pool >= 0:
                self.vectors_of[p.sequence.request_id] = vectors[p.pool]
            if p.ending is not None:
                self.endings_of[name] = p.ending.reason
        for search in result.beams:
            self.found[search.live[0].request_id] = search.finished
        return progress

    def generate(
        self, prompt: list[int], count: int, choice: int = 0, media: Iterable[MediaSpan] = ()
    ) -> list[int]:
        """So many tokens that one choice must give, whatever the schedule."""
        first = start_of(self.scheduler.capacity, prompt, media)
        return MODEL.generate(with_pictures(prompt, media), choice, count, False, first)

    def _expected(self, progress: Progress) -> int:
        one = progress.sequence
        prompt = one.tokens[: one.prompt_len]
        first = start_of(self.scheduler.capacity, prompt, one.media, one.cache_salt)
        attended = self.scheduler.capacity.num_encoder_blocks > 0  # in the place of rows
        before = one.tokens[: one.prompt_len + progress.start]
        before = with_pictures(before, () if attended else one.media)
        return MODEL.next_token(state_after(before, first), one.choice)

    def step(self) -> list[Progress]:
        """One plan and its answer."""
        assert self.send()
        return self.answer()

    def finish(self) -> None:
        """Runs until nothing is left."""
        for _ in range(3_000):
            while len(self.in_flight) < 2 and self.send():
                pass
            if not self.in_flight:
                return
            self.answer()
        raise AssertionError("it never ended")
