"""A grammar that takes long to read: it is read beside the steps, and its first mask is the first that waits."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.decoder.devices.base.device import Device
from services.decoder.sampling.logits_processors.token_masks import Grammar, TokenMatcher
from services.decoder.sampling.sampler import Sampler
from services.decoder.settings import DecoderSettings
from services.decoder.worker.worker import Worker
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult
from tests.decoder.parallel.test_out_of_memory import Ranks
from tests.decoder.sampling.test_token_masks import GRAMMAR, Continuations, follows
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

PROMPTS = [[5, 9, 200, 31], [7, 8, 9, 10, 11], [60, 61]]
BLOCKS = 2
_PATIENCE_S = 60.0


class SlowContinuations(Continuations):
    """Reads grammars when it is allowed to; `begun` says that it has been asked."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def prepare(self, grammar: Grammar) -> tuple[dict[str, list[int]], str]:
        """The hook's method."""
        self.begun.set()
        assert self.may_go_on.wait(_PATIENCE_S)
        return super().prepare(grammar)


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> list[SlowContinuations]:
    """Of the decoders that are loaded from now on."""
    made: list[SlowContinuations] = []

    def make_sampler(
        device: Device, max_slots: int, vocab_size: int, matcher: TokenMatcher | None = None
    ) -> Sampler:
        made.append(SlowContinuations())
        return Sampler(max_slots, vocab_size, made[-1])

    monkeypatch.setattr(Device, "make_sampler", make_sampler)
    return made


@pytest.fixture(params=LOADS)
def worker(
    matchers: list[SlowContinuations], llama_folder: Path, request: pytest.FixtureRequest
) -> Worker:
    chosen = {"model": llama_folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    found: Worker = LOADS[request.param](
        DecoderSettings.model_validate({**chosen, "threads": 1})
    ).worker
    return found


def opening(step: int, slots: Sequence[int], sampled: bool = True, **changes: Any) -> StepPlan:
    """Computes the prompts of new sequences."""
    order = list(range(len(slots)))
    return make_plan(
        step=step,
        new=[introduce(Text(slot, PROMPTS[slot], greedy(**changes))) for slot in slots],
        edit_slot=list(slots),
        edit_index=[0] * len(slots),
        edit_len=[BLOCKS] * len(slots),
        edit_blocks=[1 + BLOCKS * slot + n for slot in slots for n in range(BLOCKS)],
        row_slot=list(slots),
        row_start=[0] * len(slots),
        row_count=[len(PROMPTS[slot]) for slot in slots],
        sample_row=order if sampled else [],
        sample_slot=list(slots) if sampled else [],
    )


def going_on(step: int, lengths: dict[int, int]) -> StepPlan:
    """One token more of sequences with so many tokens."""
    order = list(range(len(lengths)))
    return make_plan(
        step=step,
        row_slot=list(lengths),
        row_start=[length - 1 for length in lengths.values()],
        row_count=[1] * len(lengths),
        sample_row=order,
        sample_slot=list(lengths),
    )


def run(worker: Worker, plan: StepPlan) -> StepResult:
    results: list[StepResult] = []
    worker.step(worker.accept(plan), results.append)
    return results[0]


def generate(worker: Worker, first: int, steps: int) -> list[list[int]]:
    """Tokens of slots 0 and 1, which had a first one at step `first`."""
    found = []
    for n in range(steps):
        lengths = {slot: len(PROMPTS[slot]) + 1 + n for slot in (0, 1)}
        result = run(worker, going_on(first + 1 + n, lengths))
        assert not result.failed
        found.append(read_ints(result.tokens))
    return found


def expected_tokens(worker: Worker, matcher: SlowContinuations) -> list[list[int]]:
    """Of slot 0 without a grammar and slot 1 with one, where nothing is late."""
    matcher.may_go_on.set()
    [free] = read_ints(run(worker, opening(1, [0])).tokens)
    [bound] = read_ints(run(worker, opening(2, [1], grammar=GRAMMAR)).tokens)
    tokens = [[free, bound], *generate(worker, 2, 8)]
    worker.reset()
    matcher.may_go_on.clear()
    matcher.begun.clear()
    return tokens


def test_others_go_on_while_a_grammar_is_read(
    worker: Worker, matchers: list[SlowContinuations]
) -> None:
    [matcher] = matchers
    expected = expected_tokens(worker, matcher)
    [free] = read_ints(run(worker, opening(1, [0])).tokens)
    late = worker.accept(opening(2, [1], grammar=GRAMMAR))  # does not wait
    assert matcher.begun.wait(_PATIENCE_S)
    results: list[StepResult] = []
    step = worker.launch(late)  # its prompt is computed too
    collecting = threading.Thread(target=worker.collect, args=(step, results.append))
    collecting.start()
    collecting.join(0.1)
    assert collecting.is_alive(), "the first token needs the mask"
    # Nor is the lock held meanwhile: the next step is applied and submitted.
    other = worker.launch(worker.accept(opening(3, [2])))
    matcher.may_go_on.set()
    collecting.join(_PATIENCE_S)
    worker.collect(other, results.append)
    [bound], [third] = (read_ints(result.tokens) for result in results)
    assert third >= 0 and [[free, bound], *generate(worker, 3, 8)] == expected
    assert follows([tokens[1] for tokens in expected])


def test_a_prompt_in_parts_hides_the_time_that_its_grammar_takes(
    worker: Worker, matchers: list[SlowContinuations]
) -> None:
    """Steps that choose no token of it neither wait nor fail, and a fork has the grammar too."""
    [matcher] = matchers
    expected = expected_tokens(worker, matcher)
    run(worker, opening(1, [0]))
    assert not run(worker, opening(2, [1], sampled=False, grammar=GRAMMAR)).failed
    [second] = read_ints(run(worker, going_on(3, {0: len(PROMPTS[0]) + 1})).tokens)
    assert second == expected[1][0]
    matcher.may_go_on.set()
    blocks = list(range(20, 20 + BLOCKS))
    again = make_plan(
        step=4, fork_child=[2], fork_parent=[1], fork_choice=[1], edit_slot=[2], edit_index=[0],
        edit_len=[BLOCKS], edit_blocks=blocks, row_slot=[2], row_start=[0],
        row_count=[len(PROMPTS[1])], sample_row=[0], sample_slot=[2],
    )  # fmt: skip
    [token] = read_ints(run(worker, again).tokens)
    assert token == expected[0][1]


def test_a_grammar_that_is_wrong_fails_its_sequence_alone(
    worker: Worker, matchers: list[SlowContinuations]
) -> None:
    [matcher] = matchers
    matcher.may_go_on.set()
    plan = opening(1, [0, 1])
    plan.new[1].sampling.grammar = "nonsense"
    result = run(worker, plan)
    free, none = read_ints(result.tokens)
    [failed] = result.failed
    assert free >= 0 and none == -1
    assert (failed.row, failed.failure.reason) == (1, "INVALID_GRAMMAR")
    assert not run(worker, going_on(2, {0: len(PROMPTS[0]) + 1})).failed
    worker.reset()
    assert len(matcher) == 0


def test_ranks_that_are_ready_at_different_times_choose_the_same(
    matchers: list[SlowContinuations], llama_folder: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        ranks = Ranks(llama_folder, pool)
        matchers[0].may_go_on.set()
        threading.Timer(0.3, matchers[1].may_go_on.set).start()
        plan = opening(1, [0, 1])
        plan.new[1].sampling.grammar = GRAMMAR
        one, other = ranks.both(lambda worker: run(worker, plan))
        assert one.tokens == other.tokens and not one.failed
        bad = opening(2, [2], grammar="nonsense")
        for result in ranks.both(lambda worker: run(worker, bad)):
            assert result.failed[0].failure.reason == "INVALID_GRAMMAR"
