"""A sequence that is given drafts, by a worker on any device."""

from collections.abc import Sequence
from typing import Any

from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult
from tests.support.decoder.mixed_samples import BLOCKS, PROMPTS, Kind, generate, tokens_of
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

SLOT = 1
LENGTH = len(PROMPTS[SLOT])
WRONG = 399  # chosen in none of the runs


def right_and_wrong(known: Sequence[int], step: int) -> list[int]:
    """Drafts of which `step % 4` are right, and mostly one is not."""
    right = list(known[: step % 4])
    return right if step % 3 == 0 else [*right, WRONG]


class DraftedRun:
    """A sequence at the slot SLOT, one plan at a time; others `beside` it have no drafts."""

    def __init__(self, worker: Worker, kind: Kind, beside: Sequence[int] = ()) -> None:
        self.worker, self.beside = worker, list(beside)
        self.tokens: list[int] = []
        self.results: list[StepResult] = []
        self.lengths = {slot: len(PROMPTS[slot]) for slot in self.beside}
        slots = [SLOT, *self.beside]
        kinds: dict[int, Kind] = {SLOT: kind, **{slot: {} for slot in self.beside}}
        self.opening = {
            "new": [introduce(Text(s, PROMPTS[s], greedy(seed=s, **kinds[s]))) for s in slots],
            "edit_slot": slots,
            "edit_index": [0] * len(slots),
            "edit_len": [BLOCKS] * len(slots),
            "edit_blocks": [1 + BLOCKS * slot + n for slot in slots for n in range(BLOCKS)],
        }

    def plan(self, drafts: Sequence[int]) -> StepPlan:
        """The next step, with drafts for SLOT alone; the first one computes the prompts as well."""
        at, first, count = len(self.results), LENGTH + len(self.tokens), len(drafts)
        others = self.beside
        starts = [first - 1, *(self.lengths[s] + at - 1 for s in others)]
        fields: dict[str, Any] = {
            "step": at + 1,
            "row_slot": [SLOT, *others],
            "row_start": starts if at else [0] * (1 + len(others)),
            "row_count": [1 + count] + [1] * len(others),
            # Those of one row need not stand together.
            "sample_row": [0, *range(1, 1 + len(others)), *[0] * count],
            "sample_slot": [SLOT, *others, *[SLOT] * count],
            "draft_slot": [SLOT] * count,
            "draft_token": list(drafts),
        }
        if not at:
            fields["row_count"] = [LENGTH + count, *self.lengths.values()]
            fields |= self.opening
        return make_plan(**fields)

    def step(self, drafts: Sequence[int]) -> StepResult:
        """Runs it; the tokens of SLOT are added."""
        plan = read_plan(self.plan(drafts), self.worker.limits)
        self.worker.step(plan, self.results.append)
        result = self.results[-1]
        assert not result.failed, result.failed
        self.tokens += [
            token
            for slot, token in zip(plan.sample_slot, read_ints(result.tokens), strict=True)
            if slot == SLOT and token >= 0
        ]
        return result


def drafted(
    worker: Worker, kind: Kind, expected: Sequence[int], beside: Sequence[int] = ()
) -> DraftedRun:
    """Until as many tokens as `expected` are there, which are what is drafted. Each step accepts the right ones."""
    run = DraftedRun(worker, kind, beside)
    while len(run.tokens) < len(expected):
        at = len(run.tokens)
        drafts = right_and_wrong(expected[at:], len(run.results))
        result = run.step(drafts)
        right = 0
        while right < len(drafts) and drafts[right] == (*expected, None, None)[at + right]:
            right += 1
        if drafts:
            assert read_ints(result.accepted) == [right]
        else:
            assert not result.accepted
        assert len(run.tokens) == at + right + 1
    return run


def undrafted(worker: Worker, kind: Kind) -> list[StepResult]:
    """The sequence without drafts."""
    return generate(worker, {SLOT: kind})


def require_equal_with_drafts(worker: Worker, kind: Kind) -> None:
    """Its tokens are those of a run without drafts, and come in fewer steps."""
    expected = [token for [token] in tokens_of(undrafted(worker, kind))]
    run = drafted(worker, kind, expected)
    assert run.tokens[: len(expected)] == expected
    assert len(run.results) < len(expected)
    worker.reset()
