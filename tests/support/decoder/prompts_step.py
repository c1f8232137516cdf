"""A step of several prompts on a worker, and one after it."""

from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan

PROMPTS = [[5, 6, 7], list(range(100, 140)), [9, 8, 7, 6]]
SLOTS = list(range(len(PROMPTS)))
LENGTHS = [len(prompt) for prompt in PROMPTS]
LARGEST = 1
BLOCKS = 3  # of each sequence


def run_prompts(worker: Worker, sampling: SamplingParams | None = None) -> StepResult:
    """The first step of a worker without sequences: all prompts in full, and a token of each, greedily unless
    `sampling` says otherwise."""
    worker.reset()
    sampling = sampling or greedy()
    plan = make_plan(
        step=1,
        new=[introduce(Text(slot, PROMPTS[slot], sampling)) for slot in SLOTS],
        edit_slot=SLOTS,
        edit_index=[0] * len(SLOTS),
        edit_len=[BLOCKS] * len(SLOTS),
        edit_blocks=list(range(1, 1 + BLOCKS * len(SLOTS))),
        row_slot=SLOTS,
        row_start=[0] * len(SLOTS),
        row_count=LENGTHS,
        sample_row=SLOTS,
        sample_slot=SLOTS,
    )
    return _run(worker, plan)


def run_next(worker: Worker, slots: list[int]) -> StepResult:
    """One token of some of the sequences."""
    rows = list(range(len(slots)))
    plan = make_plan(
        step=2,
        row_slot=slots,
        row_start=[LENGTHS[slot] for slot in slots],
        row_count=[1] * len(slots),
        sample_row=rows,
        sample_slot=slots,
    )
    return _run(worker, plan)


def _run(worker: Worker, plan: StepPlan) -> StepResult:
    results: list[StepResult] = []
    worker.step(read_plan(plan, worker.limits), results.append)
    return results[0]
