"""Plans of the scheduler's core give the same results, whether each is taken to its end before the next or the next is
launched meanwhile."""

import random
from pathlib import Path
from typing import Any

import pytest

from services.decoder.loading.load import load
from services.decoder.sampling import device_sampler
from services.decoder.settings import DecoderSettings
from services.scheduler.core.scheduler import Scheduler
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.decoder.deferred_device import DeferredDevice, load_deferred
from tests.support.decoder.recorded_plans import (
    DRAWN,
    GREEDY,
    RecordedDrive,
    add_requests,
    core,
    poison,
    replay,
)

ALL: list[dict[str, Any]] = [
    *DRAWN,
    {"presence_penalty": 0.5},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
]
SLOTS = 6


def settings(folder: Path) -> DecoderSettings:
    chosen = {"model": folder, "device": "cpu", "max_num_seqs": SLOTS, "num_host_blocks": 8}
    return DecoderSettings.model_validate(
        {**chosen, "kv_cache_memory_bytes": 20 << 13, "threads": 1, "max_model_len": 256}
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
@pytest.mark.parametrize("kinds", [GREEDY, DRAWN, ALL])
@pytest.mark.parametrize("candidates", [device_sampler.CANDIDATES, 8])
def test_results_are_those_of_steps_in_turn(
    llama_folder: Path,
    kinds: list[dict[str, Any]],
    seed: int,
    candidates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few candidates the host has to choose many of the tokens that the device should."""
    monkeypatch.setattr(device_sampler, "CANDIDATES", candidates)
    numbers = random.Random(seed)
    in_turn, ahead = load(settings(llama_folder)), load_deferred(settings(llama_folder))
    bad = {(numbers.randrange(SLOTS), numbers.randint(3, 80)) for _ in range(8)} if seed % 2 else ()
    for loaded in (in_turn, ahead):
        poison(loaded.worker._model, bad)
    scheduler = Scheduler(core(in_turn))
    width = in_turn.worker.model.config.hidden_size
    sampling = add_requests(scheduler, kinds, numbers, 24, width)
    drive = RecordedDrive(scheduler, in_turn, sampling)
    drive.finish()
    assert drive.vectors_of
    found = replay(ahead.worker, drive.recording.plans)
    for plan, (expected, got) in enumerate(zip(drive.recording.results, found, strict=True)):
        assert StepResult.FromString(got) == StepResult.FromString(expected), plan
    assert isinstance(ahead.device, DeferredDevice) and not ahead.device.faults
