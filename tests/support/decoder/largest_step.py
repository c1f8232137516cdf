"""`python -m tests.support.decoder.largest_step FOLDER SETTINGS`: loads a decoder and runs the largest step that a
scheduler may send it, in a process whose memory nothing else has touched. Prints the bytes that were predicted and
those that it took."""

import json
import sys
import time
from pathlib import Path

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import Limits, read_plan
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult
from tests.support.decoder.step_stream import greedy, ints, make_plan


def main(folder: str, options: str) -> None:
    """Prints what the step took."""
    loaded = load(DecoderSettings.model_validate({"model": Path(folder), **json.loads(options)}))
    limits = loaded.worker.limits
    plan = read_plan(largest_plan(limits), limits)
    results: list[StepResult] = []
    time.sleep(1)  # until the cache's pages are there
    took = loaded.device.peak_bytes(lambda: loaded.worker.step(plan, results.append))
    assert not results[0].failed, results[0].failed
    print(json.dumps({"predicted": loaded.profile.step_bytes, "took": took}))


def largest_plan(limits: Limits) -> StepPlan:
    """Every slot has a prompt and samples from its end with a temperature, the first of them taking what is left."""
    counts = [1] * limits.max_slots
    counts[0] += limits.max_batched_tokens - limits.max_slots
    block_size = limits.block_size
    slots = list(range(len(counts)))
    needed = [-(-count // block_size) for count in counts]
    return make_plan(
        step=1,
        new=[
            NewSequence(
                slot=slot,
                prompt_len=count,
                tokens=ints([slot % 90 + 3] * count),
                sampling=greedy(temperature=1.0, seed=slot),
            )
            for slot, count in enumerate(counts)
        ],
        edit_slot=slots,
        edit_index=[0] * len(counts),
        edit_len=needed,
        edit_blocks=list(range(1, sum(needed) + 1)),
        row_slot=slots,
        row_start=[0] * len(counts),
        row_count=counts,
        sample_row=slots,
        sample_slot=slots,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
