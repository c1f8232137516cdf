"""Layers that keep state for each slot give what the same model gives without batches, blocks and slots, whatever plans
do with its sequences."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.loading.load import Loaded, load
from services.decoder.sampling import device_sampler
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from services.scheduler.core.scheduler import Scheduler
from shared.errors import InvalidRequest
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult
from tests.support.decoder.deferred_device import LOADS, DeferredDevice, load_deferred
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.plans import go_on, new_text, whole_prompt
from tests.support.decoder.prompts_step import (
    LARGEST,
    LENGTHS,
    PROMPTS,
    SLOTS,
    run_next,
    run_prompts,
)
from tests.support.decoder.recorded_plans import (
    DRAWN,
    RecordedDrive,
    add_requests,
    core,
    poison,
    replay,
)
from tests.support.decoder.recurrent import (
    HYBRID,
    PURE,
    VOCABULARY,
    PlainLoop,
    install,
    make_recurrent,
)
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    introduce,
    make_plan,
    read_ints,
    running_decoder,
)

KINDS = {"pure": PURE, "hybrid": HYBRID}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recurrent(tmp_path_factory.mktemp(request.param), KINDS[request.param])


@pytest.fixture(scope="module", params=LOADS)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def stream(folder: Path, device: str, short_tmp: Path) -> AsyncIterator[StepStream]:
    async with (
        running_decoder(folder, short_tmp / "s", load=LOADS[device], max_num_seqs=6) as decoder,
        StepStream.open(decoder.address) as opened,
    ):
        yield opened


def settings(folder: Path, **changes: Any) -> DecoderSettings:
    chosen = {"model": folder, "device": "cpu", "threads": 1, "max_num_seqs": 6}
    return DecoderSettings.model_validate({**chosen, "max_model_len": 256, **changes})


def drawn_prompt(length: int, seed: int = 5) -> list[int]:
    numbers = np.random.default_rng(seed).integers(0, VOCABULARY, length)
    return [int(number) for number in numbers]


def assert_plain(folder: Path, prompt: list[int], output: list[int]) -> None:
    """Up to ties what the plain loop gives."""
    assert_same_up_to_ties(output, *PlainLoop(folder).generate(prompt, len(output)))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
async def test_tokens_are_those_of_the_plain_loop_in_any_batch(
    folder: Path, stream: StepStream, chunk: int
) -> None:
    texts = [Text(slot, drawn_prompt(5 + 9 * slot, slot), greedy()) for slot in range(5)]
    scheduler = NaiveScheduler(stream)
    await scheduler.generate(texts[:2], 3, chunk)
    await scheduler.generate(texts[1:], 6, chunk)
    await scheduler.generate(texts, 8, chunk)
    for text in texts:
        assert_plain(folder, list(text.prompt), text.output[:8])


async def test_choices_go_on_from_what_the_row_of_their_prompt_leaves(
    folder: Path, stream: StepStream
) -> None:
    prompt = drawn_prompt(19)
    plan = {**new_text(prompt, 0, [1, 2]), **whole_prompt(prompt, 0)}
    forks = {"fork_child": [4], "fork_parent": [0], "fork_choice": [1]}
    plan |= {**forks, "sample_row": [0, 0], "sample_slot": [0, 4]}
    plan |= {"edit_slot": [0, 4], "edit_index": [0, 0], "edit_len": [2, 2]}
    plan |= {"edit_blocks": [1, 2, 1, 2]}
    first = read_ints((await stream.run(make_plan(**plan))).tokens)
    blocks = {"edit_slot": [4], "edit_index": [1], "edit_len": [1], "edit_blocks": [3]}
    copied = await stream.run(make_plan(**blocks, copy_src=[2], copy_dst=[3]))
    assert not copied.failed
    # One goes on before the other does.
    for slot, token in zip((4, 0), first[::-1], strict=True):
        assert_plain(folder, prompt, [token, *await go_on(stream, slot, len(prompt), 6)])


async def test_a_fork_of_a_sequence_that_generates_goes_on_from_its_state(
    folder: Path, stream: StepStream
) -> None:
    prompt = drawn_prompt(11)
    result = await stream.run(make_plan(**new_text(prompt, 2, [1, 2]), **whole_prompt(prompt, 2)))
    output = read_ints(result.tokens) + await go_on(stream, 2, len(prompt), 4)
    forked = make_plan(
        fork_child=[5], fork_parent=[2], fork_choice=[1],
        edit_slot=[5], edit_index=[0], edit_len=[2], edit_blocks=[3, 4],
        copy_src=[1, 2], copy_dst=[3, 4],
        row_slot=[2, 5], row_start=[15, 15], row_count=[1, 1], sample_row=[0, 1], sample_slot=[2, 5],
    )  # fmt: skip
    last = read_ints((await stream.run(forked)).tokens)
    for slot, token in zip((2, 5), last, strict=True):
        after = await go_on(stream, slot, len(prompt) + 5, 3)
        assert_plain(folder, prompt, [*output, token, *after])


async def test_a_slot_begins_without_the_state_of_the_sequence_before(
    folder: Path, stream: StepStream
) -> None:
    for round_ in range(4):
        prompt = drawn_prompt(9 + round_, round_)
        drop = [0] if round_ else []
        plan = {**new_text(prompt, 0, [1, 2]), **whole_prompt(prompt, 0), "drop": drop}
        first = read_ints((await stream.run(make_plan(**plan))).tokens)
        assert_plain(folder, prompt, first + await go_on(stream, 0, len(prompt), 5))


async def test_a_sequence_that_was_preempted_begins_again_in_its_slot(
    folder: Path, stream: StepStream
) -> None:
    prompt = drawn_prompt(2)
    first = await stream.run(make_plan(**new_text(prompt, 0, [1]), **whole_prompt(prompt, 0)))
    output = read_ints(first.tokens)
    for block in (5, 2, 7):
        again = {"edit_slot": [0], "edit_index": [0], "edit_len": [1], "edit_blocks": [block]}
        tokens = whole_prompt([*prompt, *output], 0)
        output += read_ints((await stream.run(make_plan(**again, **tokens))).tokens)
    assert_plain(folder, prompt, output + await go_on(stream, 0, len(prompt) + 3, 3))


async def test_a_row_that_does_not_start_where_the_state_ends_fails(stream: StepStream) -> None:
    prompt = drawn_prompt(12)
    plan = {**new_text(prompt, 0, [1]), **whole_prompt(prompt, 0)}
    result = await stream.run(make_plan(**{**plan, "row_start": [8], "row_count": [4]}))
    assert [row.failure.reason for row in result.failed] == ["ROW_MISMATCH"]


async def test_the_scheduler_is_told(stream: StepStream) -> None:
    assert stream.hello.has_state and stream.hello.num_host_blocks == 0


@pytest.fixture
def worker(folder: Path, device: str) -> Worker:
    loaded: Loaded = LOADS[device](settings(folder))
    return loaded.worker


def test_a_step_that_is_computed_again_advances_state_once(
    folder: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory fails behind all layers, whose state is written by then."""
    inner = worker._model.forward
    calls: list[int] = []

    def forward(hidden: torch.Tensor, *given: Any) -> torch.Tensor:
        found = inner(hidden, *given)
        calls.append(len(hidden))
        if len(calls) in (1, 3):
            raise torch.OutOfMemoryError("there is none left")
        return found

    monkeypatch.setattr(worker._model, "forward", forward)
    outputs = [[token] for token in read_ints(run_prompts(worker).tokens)]
    for output, token in zip(outputs, read_ints(run_next(worker, SLOTS).tokens), strict=True):
        output.append(token)
    assert len(calls) == 4
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_plain(folder, prompt, output)


def test_rows_that_are_prepared_again_without_the_largest_begin_where_they_did(
    folder: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of their prompts."""
    inner = worker._model.forward
    head = 2  # tokens of each prompt in a step before

    def forward(hidden: torch.Tensor, *given: Any) -> torch.Tensor:
        found = inner(hidden, *given)
        if len(hidden) > LENGTHS[LARGEST] - head:
            raise torch.OutOfMemoryError("there is none left")
        return found

    worker.reset()
    new = [introduce(Text(slot, PROMPTS[slot], greedy())) for slot in SLOTS]
    tables = {"edit_slot": SLOTS, "edit_index": [0] * 3, "edit_len": [3] * 3}
    rows = {"row_slot": SLOTS, "row_start": [0] * 3, "row_count": [head] * 3}
    run(worker, 1, new=new, **tables, edit_blocks=list(range(1, 10)), **rows)
    monkeypatch.setattr(worker._model, "forward", forward)
    rows |= {"row_start": [head] * 3, "row_count": [length - head for length in LENGTHS]}
    result = run(worker, 2, **rows, sample_row=SLOTS, sample_slot=SLOTS)
    assert [failed.row for failed in result.failed] == [LARGEST]
    others = [slot for slot in SLOTS if slot != LARGEST]
    first, after = read_ints(result.tokens), read_ints(run_next(worker, others).tokens)
    for slot, token in zip(others, after, strict=True):
        assert_plain(folder, PROMPTS[slot], [first[slot], token])


def run(worker: Worker, step: int, **fields: Any) -> StepResult:
    results: list[StepResult] = []
    worker.step(read_plan(make_plan(step=step, **fields), worker.limits), results.append)
    return results[0]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))])
def test_plans_of_the_scheduler_give_the_same_in_turn_and_ahead(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, forks, preemption for want of blocks; with few candidates rows run again on the token that the host
    chose."""
    monkeypatch.setattr(device_sampler, "CANDIDATES", 8)
    numbers = random.Random(seed)
    in_turn, ahead = load(settings(folder)), load_deferred(settings(folder))
    bad = {(numbers.randrange(6), numbers.randint(3, 80)) for _ in range(8)} if seed % 2 else ()
    for loaded in (in_turn, ahead):
        poison(loaded.worker._model, bad)
    scheduler = Scheduler(core(in_turn, has_state=True, num_blocks=9))
    sampling = add_requests(scheduler, DRAWN, numbers, 24)
    drive = RecordedDrive(scheduler, in_turn, sampling)
    drive.finish()
    assert scheduler.state.preemptions > 0 and scheduler.state.swaps == 0
    if not bad:
        assert_all_plain(folder, drive)
    found = replay(ahead.worker, drive.recording.plans)
    for plan, (expected, got) in enumerate(zip(drive.recording.results, found, strict=True)):
        assert StepResult.FromString(got) == StepResult.FromString(expected), plan
    assert isinstance(ahead.device, DeferredDevice) and not ahead.device.faults


def assert_all_plain(folder: Path, drive: RecordedDrive) -> None:
    """Of all sequences that are not drawn."""
    compared = 0
    for plan in drive.recording.plans:
        for new in StepPlan.FromString(plan).new:
            output = drive.outputs_of[new.request_id, new.choice]
            if not new.sampling.temperature and output:
                assert_plain(folder, read_ints(new.tokens)[: new.prompt_len], output)
                compared += 1
    assert compared > 3


def test_memory_is_divided_among_state_and_blocks(folder: Path) -> None:
    limits = load(settings(folder)).worker.limits
    assert limits.num_blocks == 6 * 16 + 1, "all that 6 sequences of 256 tokens fill"
    with pytest.raises(InvalidRequest, match="lower --max-num-seqs") as refused:
        load(settings(folder, kv_cache_memory_bytes=1000))
    assert refused.value.reason == "KV_CACHE_TOO_SMALL"
    with pytest.raises(InvalidRequest, match="--num-host-blocks 4"):
        load(settings(folder, num_host_blocks=4))


def test_state_is_taken_off_before_blocks(tmp_path: Path) -> None:
    folder = make_recurrent(tmp_path, HYBRID)
    given = 100_000
    loaded = load(settings(folder, kv_cache_memory_bytes=given))
    of_one = 2 * (2 * 32 * 4 + 32 * 4)  # two layers: inputs of the convolution, sums
    left = given - (1 + 2 * 6) * of_one
    assert loaded.worker.limits.num_blocks == left // (2 * 16 * 2 * 16 * 4)
    with pytest.raises(InvalidRequest, match="bytes of state"):
        load(settings(folder, kv_cache_memory_bytes=60_000))
