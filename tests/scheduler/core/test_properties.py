"""Events in any order: blocks are counted, budgets kept, every sequence ends and every token is right."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.budget import AttentionKind
from services.scheduler.core.planner import PreemptionMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import POLICIES, EndReason, MediaSpan, Sequence
from tests.support.arithmetic.drive import Drive, capacity, search_alone, sequence, start_of
from tests.support.arithmetic.model import state_after
from tests.support.arithmetic.worker import pooled_state

BLOCK = 4
SPAN = 6
CAUSAL = AttentionKind.CAUSAL
PREFIX = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26]
OUTPUTS = st.integers(1, 14)
ALONE = st.sampled_from([0, 0, 0, 1, 4, 1000])  # tokens for which a sequence runs alone


class AnyOrder(RuleBasedStateMachine):
    """A scheduler with plans in flight, and all events that it may get."""

    @initialize(
        blocks=st.integers(14, 40),
        budget=st.integers(4, 40),
        slots=st.integers(4, 7),
        host=st.sampled_from([0, 3, 30]),
        mode=st.sampled_from(list(PreemptionMode)),
        policy=st.sampled_from(sorted(POLICIES)),
        target_us=st.sampled_from([0, 20, 60]),
        kind=st.sampled_from([CAUSAL, *AttentionKind]),
        whole=st.sampled_from([False, False, True]),
        has_state=st.sampled_from([False, False, True]),
        encoder_budget=st.sampled_from([1, 8, None]),
        drafts=st.sampled_from([0, 1, 3]),
        accuracy=st.sampled_from([0.02, 0.7, 1.0]),
    )
    def begin(
        self,
        blocks: int,
        budget: int,
        slots: int,
        host: int,
        mode: PreemptionMode,
        policy: str,
        target_us: int,
        kind: AttentionKind,
        whole: bool,
        has_state: bool,
        encoder_budget: int | None,
        drafts: int,
        accuracy: float,
    ) -> None:
        media = kind is AttentionKind.BIDIRECTIONAL_MEDIA and not whole
        longest = SPAN if media else blocks * BLOCK
        limits = capacity(
            kind,
            whole_prompt=whole,
            num_blocks=blocks,
            max_slots=slots,
            max_batched_tokens=budget,
            num_host_blocks=host,
            has_state=has_state,
            max_step_tokens=longest + slots - 1,
            max_drafts=0 if whole or has_state else drafts,
        )
        self.scheduler = Scheduler(
            limits, encoder_budget, POLICIES[policy], preemption_mode=mode, step_target=target_us
        )
        self.scheduler.costs.announced(2, 2)
        self.drive = Drive(self.scheduler, accuracy)
        self.blocks, self.host = blocks, host
        self.number = 0
        self.has_state = has_state
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.searches: dict[str, tuple[list[int], dict[str, object]]] = {}
        self.vectors: dict[str, list[float]] = {}  # of prompts that are pooled
        self.gone: set[str] = set()  # cancelled or failed

    def name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    def room(self, prompt: list[int]) -> int:
        return (self.blocks - 1) * BLOCK - len(prompt)

    @rule(
        shared=st.sampled_from([0, 8, 16]),
        tail=st.lists(st.integers(1, 90), min_size=1, max_size=12),
        count=OUTPUTS,
        n=st.integers(1, 4),
        priority=st.integers(0, 1),
        scored=st.booleans(),
        alone=ALONE,
    )
    def add(
        self,
        shared: int,
        tail: list[int],
        count: int,
        n: int,
        priority: int,
        scored: bool,
        alone: int,
    ) -> None:
        name, prompt = self.name(), PREFIX[:shared] + tail
        count = min(count, self.room(prompt))
        more = {"arrival": self.number, "priority": priority, "reads_prompt": scored}
        more["isolated_until"] = alone and len(prompt) + alone
        choices = [sequence(name, prompt, count, choice=c, **more) for c in range(n)]
        assert self.scheduler.add(*choices) is None
        for c in range(n):
            self.expected[name, c] = self.drive.generate(prompt, count, c)

    @rule(
        shared=st.sampled_from([0, 8, 16]),
        tail=st.lists(st.integers(1, 90), min_size=1, max_size=12),
        whole=st.booleans(),
        alone=ALONE,
    )
    def pool(self, shared: int, tail: list[int], whole: bool, alone: int) -> None:
        name, prompt = self.name(), PREFIX[:shared] + tail
        options = {"arrival": self.number, "pooled_width": 2, "reads_prompt": whole}
        options["isolated_until"] = alone and len(prompt) + alone
        assert self.scheduler.add(sequence(name, prompt, 1, **options)) is None
        state = state_after(prompt, start_of(self.scheduler.capacity, prompt))
        self.vectors[name] = pooled_state(state, 2)

    @rule(
        tail=st.lists(st.integers(1, 90), min_size=1, max_size=12),
        known=OUTPUTS,
        count=OUTPUTS,
        alone=ALONE,
    )
    def resume(self, tail: list[int], known: int, count: int, alone: int) -> None:
        """A request comes from another scheduler with a part of its output."""
        name = self.name()
        count = min(known + count, self.room(tail))
        output = self.drive.generate(tail, count)
        tokens = tail + output[: min(known, count - 1)]
        one = Sequence(name, tokens, len(tail), count, arrival=self.number)
        one.isolated_until = alone and len(tokens) + alone
        self.drive.outputs_of[name, 0] = tokens[len(tail) :]
        assert self.scheduler.add(one) is None
        self.expected[name, 0] = output

    @rule(
        tail=st.lists(st.integers(1, 90), min_size=1, max_size=9),
        count=st.integers(1, 8),
        beams=st.integers(1, 4),
        early=st.booleans(),
        stops=st.frozensets(st.integers(1, 97), max_size=3),
        alone=st.sampled_from([0, 0, 1000]),
    )
    def search(
        self,
        tail: list[int],
        count: int,
        beams: int,
        early: bool,
        stops: frozenset[int],
        alone: int,
    ) -> None:
        name = self.name()
        options = {
            "num_beams": beams,
            "max_tokens": min(count, self.room(tail)),
            "early_stopping": early,
            "stop_token_ids": stops,
        }
        search = BeamSearch[Sequence](**options)  # type: ignore[arg-type]
        asked = {"beams": search, "num_logprobs": search.num_top}
        first = sequence(name, tail, search.max_tokens, self.number, **asked)
        first.isolated_until = alone
        assert self.scheduler.add(first) is None
        self.searches[name] = (tail, options)

    @rule(
        items=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=3),
        count=OUTPUTS,
    )
    def add_pictures(self, items: list[tuple[int, int]], count: int) -> None:
        """Each with so much text before it."""
        name = self.name()
        prompt: list[int] = []
        spans: list[MediaSpan] = []
        for item, before in items:
            prompt += [1] * before
            spans.append(MediaSpan(bytes([item]) * 16, len(prompt), SPAN, SPAN))
            prompt += [99] * SPAN
        prompt += [2] * 3
        count = min(count, self.room(prompt))
        one = sequence(name, prompt, count, self.number, media=tuple(spans))
        assert self.scheduler.add(one) is None
        self.expected[name, 0] = self.drive.generate(prompt, count, media=spans)

    @rule()
    def encode(self) -> None:
        for span in self.scheduler.state.media.take_wanted():
            self.scheduler.embeddings_encoded(span.digest, span.digest)

    @rule()
    def fetched(self) -> None:
        for digest in self.drive.fetches:
            self.scheduler.embeddings_ready(digest)
        self.drive.fetches.clear()

    @precondition(lambda self: self.expected or self.vectors)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({n for n, _ in self.expected} | set(self.vectors))))
        if self.scheduler.cancel(name):
            self.gone.add(name)

    @precondition(lambda self: len(self.drive.in_flight) < 2)
    @rule()
    def send(self) -> None:
        if self.drive.send():
            self.no_row_is_past_missing_embeddings()
            self.isolated_requests_compute_alone()

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def answer(self) -> None:
        self.drive.answer()

    @precondition(lambda self: self.drive.in_flight and self.drive.in_flight[0].row_slot)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A row fails, and with it all sequences that sample from it; what it wrote must not be used."""
        plan = self.drive.in_flight[0]
        row = data.draw(st.sampled_from(range(len(plan.row_slot))))
        if plan.row_sequence[row].ended or plan.row_sequence[row] in self.drive.restarted():
            return
        self.gone.add(plan.row_sequence[row].request_id)
        self.drive.answer(failing_rows=[row])

    def no_row_is_past_missing_embeddings(self) -> None:
        plan = self.drive.in_flight[-1]
        for sequence_, start, count in zip(
            plan.row_sequence, plan.row_start, plan.row_count, strict=True
        ):
            reach = self.scheduler.state.media.plannable(sequence_, start)
            assert (
                sequence_.num_media_passed
                or count <= reach
                or start + count <= min((s.offset for s in sequence_.media), default=10**9)
            )

    def isolated_requests_compute_alone(self) -> None:
        rows = [s for plan in self.drive.in_flight for s in plan.row_sequence]
        if any(len(s.tokens) < s.isolated_until for s in rows):
            assert len({s.request_id for s in rows}) == 1

    @invariant()
    def every_block_is_held_as_often_as_it_is_counted(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        held = [0] * self.blocks
        for running in self.scheduler.state.running:
            for block in running.blocks:
                held[block] += 1
        assert held == [self.scheduler.state.blocks.refs(b) for b in range(self.blocks)]
        away = [0] * self.host
        for waiting in self.scheduler.state.waiting:
            assert not waiting.blocks
            for block in waiting.host_blocks:
                away[block] += 1
        counted = [self.scheduler.state.swapping.host.refs(b) for b in range(self.host)]
        pending = self.scheduler.state.swapping.num_releases
        assert sum(counted) - sum(away) == pending

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(60):
            self.encode()
            self.drive.finish()
            self.fetched()
        scheduler, drive = self.scheduler, self.drive
        assert scheduler.state.num_sequences == 0
        assert (
            scheduler.state.blocks.num_used == 0
            and scheduler.state.swapping.host.num_free == self.host
        )
        drive.send()
        assert len(scheduler.state.slots.free) == scheduler.capacity.max_slots
        for (name, choice), expected in self.expected.items():
            output = drive.outputs_of[name, choice]
            if name in self.gone:
                assert output == expected[: len(output)]
            else:
                assert output == expected
                assert drive.endings_of[name, choice] is EndReason.LENGTH
        for name, vector in self.vectors.items():
            assert drive.vectors_of.get(name) in ([vector, None] if name in self.gone else [vector])
        for name, (prompt, options) in self.searches.items():
            if name not in self.gone:
                search = BeamSearch[Sequence](**options)  # type: ignore[arg-type]
                alone = search_alone(prompt, search, start_of(scheduler.capacity, prompt))
                assert [h.steps() for h in drive.found[name]] == [h.steps() for h in alone]


AnyOrder.TestCase.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = pytest.mark.timeout(300)(AnyOrder.TestCase)
