"""`tessera profile MODEL`: which ops a prompt and the tokens after it are made of."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import structlog

from services.decoder.devices.base.op_profile import profile_ops
from services.decoder.loading.load import load
from services.decoder.profile_settings import ProfileCommandSettings
from services.decoder.settings import DecoderSettings
from services.decoder.worker.worker import Worker
from shared.errors import ServingError
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult


def main(arguments: Sequence[str]) -> int:
    """Prints a table for the prompt and one for the steps of one token of each sequence. Returns 1, with one line that
    says why, for a model or a device that cannot be used.
    """
    settings = ProfileCommandSettings.load(list(arguments), prog="tessera profile")
    try:
        with _warnings_only():
            _profile(settings)
    except ServingError as error:
        print(f"tessera profile: {error.message}", file=sys.stderr)
        return 1
    return 0


def _profile(settings: ProfileCommandSettings) -> None:
    loaded = load(
        DecoderSettings(
            model=settings.model,
            family=settings.family,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            max_num_seqs=settings.sequences,
            max_model_len=settings.prompt + settings.steps,
            max_num_batched_tokens=settings.prompt,
        )
    )
    measured = profile_ops(loaded.device)
    count = settings.sequences
    plans = _plans(loaded.worker, count, settings.prompt, settings.steps)
    for title, some in (("prompt", plans[:count]), ("decode", plans[count:])):
        measured.clear()
        seconds = _run(loaded.worker, some)
        print(f"{title}: {len(some)} steps\n{measured.table(seconds)}\n")


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Leaves out log lines of what goes as expected: they would stand between the tables."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)


def _run(worker: Worker, plans: Sequence[StepPlan]) -> float:
    """Seconds of all steps. Raises RuntimeError for a row that failed."""
    results: list[StepResult] = []
    began = time.perf_counter()
    for plan in plans:
        worker.step(worker.accept(plan), results.append)
    seconds = time.perf_counter() - began
    for result in results:
        for failed in result.failed:
            raise RuntimeError(failed.failure.message)
    return seconds


def _plans(worker: Worker, sequences: int, prompt: int, steps: int) -> list[StepPlan]:
    """One prompt after the other, then one token of each in every step."""
    blocks = -(-(prompt + steps) // worker.limits.block_size)
    greedy = SamplingParams(repetition_penalty=1, top_p=1, max_tokens=steps)
    plans = []
    for slot in range(sequences):
        tokens = _ints(*(2 + (7 * place + slot) % 200 for place in range(prompt)))
        plan = StepPlan(
            new=[NewSequence(slot=slot, prompt_len=prompt, tokens=tokens, sampling=greedy)],
            edit_slot=_ints(slot),
            edit_index=_ints(0),
            edit_len=_ints(blocks),
            edit_blocks=_ints(*range(1 + slot * blocks, 1 + (slot + 1) * blocks)),
        )
        _add_rows(plan, [slot], 0, prompt)
        plans.append(plan)
    for step in range(steps):
        plans.append(StepPlan())
        _add_rows(plans[-1], range(sequences), prompt + step, 1)
    return plans


def _add_rows(plan: StepPlan, slots: Sequence[int], start: int, count: int) -> None:
    plan.row_slot = plan.sample_slot = _ints(*slots)
    plan.row_start, plan.row_count = _ints(*[start] * len(slots)), _ints(*[count] * len(slots))
    plan.sample_row = _ints(*range(len(slots)))


def _ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()
