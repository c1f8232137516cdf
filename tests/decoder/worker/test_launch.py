"""Steps that are launched before the one before them is collected, on a device that computes beside the host."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.decoder.loading.load import Loaded, load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.decoder.deferred_device import DeferredDevice, load_deferred
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

PROMPTS = [np.random.default_rng(n).integers(0, 400, 9 + 7 * n).tolist() for n in range(3)]
SLOTS = list(range(len(PROMPTS)))
LENGTHS = [len(prompt) for prompt in PROMPTS]
COUNT = 6


@pytest.fixture
def settings(llama_folder: Path) -> DecoderSettings:
    chosen = {"model": llama_folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    return DecoderSettings.model_validate({**chosen, "threads": 1})


@pytest.fixture
def loaded(settings: DecoderSettings) -> Loaded:
    return load_deferred(settings)


@pytest.fixture
def device(loaded: Loaded) -> DeferredDevice:
    assert isinstance(loaded.device, DeferredDevice)
    return loaded.device


@pytest.fixture
def worker(loaded: Loaded) -> Worker:
    return loaded.worker


def opening(worker: Worker, **changes: Any) -> dict[str, Any]:
    """Fields of a plan that makes the prompts known."""
    blocks = -(-(max(LENGTHS) + COUNT) // worker.limits.block_size)
    return {
        "new": [introduce(Text(slot, PROMPTS[slot], greedy(**changes))) for slot in SLOTS],
        "edit_slot": SLOTS,
        "edit_index": [0] * len(SLOTS),
        "edit_len": [blocks] * len(SLOTS),
        "edit_blocks": list(range(1, 1 + blocks * len(SLOTS))),
    }


def launch(worker: Worker, step: int, **changes: Any) -> LaunchedStep:
    """The prompts in the first step, then one token of each."""
    plan = make_plan(
        step=step + 1,
        row_slot=SLOTS,
        row_start=[length + step - 1 for length in LENGTHS] if step else [0] * len(SLOTS),
        row_count=[1] * len(SLOTS) if step else LENGTHS,
        sample_row=SLOTS,
        sample_slot=SLOTS,
        **({} if step else opening(worker, **changes)),
    )
    return worker.launch(read_plan(plan, worker.limits))


def collect(worker: Worker, step: LaunchedStep) -> StepResult:
    results: list[StepResult] = []
    worker.collect(step, results.append)
    return results[0]


def run_ahead(worker: Worker) -> list[list[int]]:
    """Tokens of each step, every one launched before the one before it is collected."""
    found, launched = [], [launch(worker, 0)]
    for step in range(1, COUNT):
        launched.append(launch(worker, step))
        found.append(read_ints(collect(worker, launched.pop(0)).tokens))
    return [*found, read_ints(collect(worker, launched.pop()).tokens)]


def test_a_step_may_be_launched_before_the_one_before_it_is_collected(
    settings: DecoderSettings, worker: Worker, device: DeferredDevice
) -> None:
    on_cpu = load(settings).worker
    in_turn = [read_ints(collect(on_cpu, launch(on_cpu, n)).tokens) for n in range(COUNT)]
    assert run_ahead(worker) == in_turn
    for slot, prompt in enumerate(PROMPTS):
        expected = [*prompt, *(tokens[slot] for tokens in in_turn)]
        assert worker.slots.tokens[slot, : worker.slots.length[slot]].tolist() == expected
    assert not device.faults


def test_a_step_takes_one_copy_each_way_and_one_wait(
    worker: Worker, device: DeferredDevice
) -> None:
    run_ahead(worker)
    worker.reset()
    device.counts.clear()
    run_ahead(worker)
    each_way = {"host to device": COUNT, "device to host": COUNT}
    assert device.counts == {**each_way, "event waits": COUNT}


def test_a_step_that_is_not_collected_has_changed_only_lengths(worker: Worker) -> None:
    """What an answer reports is decided when it is collected."""
    step = launch(worker, 0)
    assert worker.slots.length[: len(PROMPTS)].tolist() == [length + 1 for length in LENGTHS]
    assert worker.slots.computed[: len(PROMPTS)].tolist() == LENGTHS
    result = collect(worker, step)
    assert not result.failed and len(read_ints(result.tokens)) == len(PROMPTS)


def test_tokens_that_the_host_chooses_are_waited_for(worker: Worker) -> None:
    first = launch(worker, 0, presence_penalty=1.0)
    launched: list[LaunchedStep] = []
    thread = threading.Thread(target=lambda: launched.append(launch(worker, 1)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not launched
    before = read_ints(collect(worker, first).tokens)
    thread.join()
    collect(worker, launched[0])
    tokens = [worker.slots.tokens[slot, LENGTHS[slot]] for slot in SLOTS]
    assert before == tokens


@pytest.mark.parametrize("changes", [{"logprobs": 2}, {"logprobs": 2, "temperature": 0.8}])
def test_log_probabilities_are_told_of_tokens_that_the_next_step_has_taken(
    settings: DecoderSettings, worker: Worker, device: DeferredDevice, changes: dict[str, Any]
) -> None:
    on_cpu = load(settings).worker
    in_turn = [collect(on_cpu, launch(on_cpu, step, **changes)) for step in range(2)]
    steps = [launch(worker, 0, **changes), launch(worker, 1)]  # nobody waits for the first
    for expected, found in zip(in_turn, [collect(worker, step) for step in steps], strict=True):
        expected.ClearField("times")
        found.ClearField("times")
        assert found == expected and found.logprobs
    assert not device.faults


def test_a_step_without_the_sequence_whose_token_the_host_chooses_need_not_wait(
    worker: Worker,
) -> None:
    fields = opening(worker)
    fields["new"][0].sampling.presence_penalty = 1.0
    whole = make_plan(
        step=1, row_slot=SLOTS, row_start=[0] * 3, row_count=LENGTHS, sample_row=SLOTS,
        sample_slot=SLOTS, **fields,
    )  # fmt: skip
    others = make_plan(
        step=2, row_slot=[1, 2], row_start=LENGTHS[1:], row_count=[1, 1], sample_row=[0, 1],
        sample_slot=[1, 2],
    )  # fmt: skip
    first = worker.launch(read_plan(whole, worker.limits))
    second = worker.launch(read_plan(others, worker.limits))
    tokens = [collect(worker, step) for step in (first, second)]
    third = collect(worker, launch_row_of_first(worker))
    alone = [read_ints(result.tokens) for result in (*tokens, third)]
    worker.reset()
    assert [alone[0][0], alone[2][0]] == in_turn(worker, 0, presence_penalty=1.0)
    worker.reset()
    assert [alone[0][1], alone[1][0]] == in_turn(worker, 1)


def launch_row_of_first(worker: Worker) -> LaunchedStep:
    plan = make_plan(
        step=3, row_slot=[0], row_start=LENGTHS[:1], row_count=[1], sample_row=[0], sample_slot=[0]
    )
    return worker.launch(read_plan(plan, worker.limits))


def in_turn(worker: Worker, slot: int, **changes: Any) -> list[int]:
    """Two tokens of one of the sequences, each step taken to its end before the next."""
    return [
        read_ints(collect(worker, launch(worker, step, **changes)).tokens)[slot]
        for step in range(2)
    ]


def test_a_sequence_that_is_dropped_meanwhile_leaves_its_slot_to_the_next(worker: Worker) -> None:
    """The token that is on its way belongs to the one that is gone."""
    first = launch(worker, 0)
    plan = make_plan(
        step=2,
        drop=[0],
        new=[introduce(Text(0, PROMPTS[2], greedy()))],
        edit_slot=[0],
        edit_index=[0],
        edit_len=[4],
        edit_blocks=[20, 21, 22, 23],
        row_slot=[0],
        row_start=[0],
        row_count=[LENGTHS[2]],
        sample_row=[0],
        sample_slot=[0],
    )
    second = worker.launch(read_plan(plan, worker.limits))
    tokens = read_ints(collect(worker, first).tokens)
    assert min(tokens) >= 0
    assert read_ints(collect(worker, second).tokens) == [tokens[2]]
    assert worker.slots.tokens[0, : LENGTHS[2] + 1].tolist() == [*PROMPTS[2], tokens[2]]


def test_times_of_a_step_leave_out_the_step_before(
    worker: Worker, device: DeferredDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1e9]  # later than anything before
    for module in ("shared.telemetry.logs", "services.decoder.worker.worker"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock[0])
    end_copies = device.end_copies

    def compute(count: int) -> None:
        clock[0] += 3  # what the device takes for a step
        end_copies(count)

    monkeypatch.setattr(device, "end_copies", compute)
    steps = [launch(worker, 0), launch(worker, 1)]
    results: list[StepResult] = []
    for step in steps:
        worker.collect(step, results.append)
    first, second = (result.times for result in results)
    assert (first.queue_us, first.sample_us) == (0, 3_000_000)
    assert (second.queue_us, second.sample_us) == (3_000_000, 3_000_000)
