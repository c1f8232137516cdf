"""Rows into which the decoder puts drafts by itself: tokens are those of a run without, and come in fewer steps."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.decoder.devices.base.device import Device
from services.decoder.sampling.logits_processors.token_masks import TokenMatcher
from services.decoder.sampling.sampler import Sampler
from services.decoder.speculation.proposer import Ints, Proposer
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.errors import InvalidRequest
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.decoder.sampling.test_token_masks import Continuations
from tests.decoder.worker.test_drafts import KINDS
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.mixed_samples import (
    BLOCKS,
    PROMPTS,
    STEPS,
    Kind,
    generate,
    settings,
    tokens_of,
)
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

SLOTS = [0, 1, 2, 3]


class Foresight(Proposer):
    """Knows what comes, and is wrong about every third token."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def begin(self, slot: int, scope: bytes) -> None:
        """Asks for nothing."""

    def end(self, slot: int, answer: Ints) -> None:
        """Keeps nothing."""

    def propose(self, slot: int, tokens: Ints, most: int) -> list[int]:
        """The next ones."""
        at = len(tokens) - len(PROMPTS[slot])
        known = [*self.outputs.get(slot, ()), *[1] * most]
        return [(t + (n % 3 == 2)) % 400 for n, t in enumerate(known[at : at + most], at)]


@pytest.fixture(params=LOADS)
def worker(
    llama_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Worker, Foresight]]:
    def make_sampler(
        device: Device, max_slots: int, vocab_size: int, matcher: TokenMatcher | None = None
    ) -> Sampler:
        return Sampler(max_slots, vocab_size, Continuations())

    monkeypatch.setattr(Device, "make_sampler", make_sampler)
    foresight = Foresight()
    monkeypatch.setattr("services.decoder.loading.load.make_proposer", lambda *_, **__: foresight)
    loaded = LOADS[request.param](settings(llama_folder)).worker
    assert loaded.max_drafts == 3
    yield loaded, foresight


def run(worker: Worker, kinds: Sequence[Kind]) -> tuple[list[list[int]], list[StepResult]]:
    """The tokens of a sequence in each slot, planned by lower bounds with plans one ahead, and the results."""
    results: list[StepResult] = []
    outputs: list[list[int]] = [[] for _ in SLOTS]
    starts, slack = [0] * len(SLOTS), [0] * len(SLOTS)
    step = 0
    while min(map(len, outputs)) < STEPS:
        step += 1
        drafts = [0] * len(SLOTS) if step == 1 else [(step + slot) % 4 for slot in SLOTS]
        fields: dict[str, Any] = {
            "row_slot": SLOTS,
            "row_start": list(starts),
            "row_count": [len(PROMPTS[s]) for s in SLOTS] if step == 1 else [1] * len(SLOTS),
            "sample_row": SLOTS,
            "sample_slot": SLOTS,
            "row_drafts": drafts,
            "row_slack": list(slack),
        }
        if step == 1:
            new = [introduce(Text(s, PROMPTS[s], greedy(seed=s, **kinds[s]))) for s in SLOTS]
            fields |= {
                "new": new,
                "edit_slot": SLOTS,
                "edit_index": [0] * len(SLOTS),
                "edit_len": [BLOCKS] * len(SLOTS),
                "edit_blocks": [1 + BLOCKS * s + n for s in SLOTS for n in range(BLOCKS)],
            }
        starts = [len(PROMPTS[s]) + step - 1 for s in SLOTS]
        slack = [a + b for a, b in zip(slack, drafts, strict=True)]
        worker.step(read_plan(make_plan(step=step, **fields), worker.limits), results.append)
        result = results[-1]
        assert not result.failed, result.failed
        drafted = iter(read_ints(result.drafted))
        counts = [1 + (next(drafted) if most else 0) for most in drafts]
        tokens = iter(read_ints(result.tokens))
        for slot, count in zip(SLOTS, counts, strict=True):
            outputs[slot] += [t for t in (next(tokens) for _ in range(count)) if t >= 0]
    worker.reset()
    return outputs, results


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_a_run_without_drafts(
    worker: tuple[Worker, Foresight], name: str
) -> None:
    decoder, foresight = worker
    kinds = [{**KINDS[name], "max_tokens": STEPS + 4}, {}, {"temperature": 0.8}, KINDS[name]]
    alone = tokens_of(generate(decoder, dict(enumerate(kinds))))
    expected = [[step[slot] for step in alone] for slot in SLOTS]
    foresight.outputs = dict(enumerate(expected))
    outputs, results = run(decoder, kinds)
    assert [one[:STEPS] for one in outputs] == expected
    assert len(results) < STEPS
    assert sum(sum(read_ints(r.accepted)) for r in results) > 0


def test_drafts_never_exceed_the_most_tokens(worker: tuple[Worker, Foresight]) -> None:
    decoder, foresight = worker
    alone = tokens_of(generate(decoder, {0: {}}))
    foresight.outputs = {0: [token for [token] in alone]}
    results: list[StepResult] = []
    opening = {
        "new": [introduce(Text(0, PROMPTS[0], greedy(max_tokens=3)))],
        "edit_slot": [0],
        "edit_index": [0],
        "edit_len": [BLOCKS],
        "edit_blocks": list(range(1, 1 + BLOCKS)),
    }
    length = len(PROMPTS[0])
    for step, (start, count, most) in enumerate([(0, length, 0), (length, 1, 3)], 1):
        plan = make_plan(
            step=step,
            row_slot=[0],
            row_start=[start],
            row_count=[count],
            sample_row=[0],
            sample_slot=[0],
            row_drafts=[most],
            row_slack=[0],
            **(opening if step == 1 else {}),
        )
        decoder.step(read_plan(plan, decoder.limits), results.append)
    assert read_ints(results[-1].drafted) == [1]
    assert read_ints(results[-1].tokens) == foresight.outputs[0][1:3]
    decoder.reset()


@pytest.mark.parametrize(
    "changes",
    [
        {"row_drafts": [1, 0]},
        {"row_count": [2]},
        {"sample_row": [], "sample_slot": []},
        {"sample_slot": [1]},
        {
            "row_count": [2],
            "draft_slot": [0],
            "draft_token": [5],
            "sample_row": [0, 0],
            "sample_slot": [0, 0],
        },
        {"row_drafts": [1 << 20]},
    ],
)
def test_a_plan_whose_rows_cannot_have_drafts_is_refused(
    worker: tuple[Worker, Foresight], changes: dict[str, list[int]]
) -> None:
    fields = {
        "row_slot": [0],
        "row_start": [9],
        "row_count": [1],
        "sample_row": [0],
        "sample_slot": [0],
        "row_drafts": [2],
        "row_slack": [1],
    }
    with pytest.raises(InvalidRequest, match="row_"):
        read_plan(make_plan(**{**fields, **changes}), worker[0].limits)


def test_drafts_are_on_by_default_and_can_be_turned_off(llama_folder: Path) -> None:
    chosen = settings(llama_folder)
    assert LOADS["cpu"](chosen).worker.max_drafts == 3
    off = chosen.model_copy(update={"speculation": "off"})
    assert LOADS["cpu"](off).worker.max_drafts == 0
