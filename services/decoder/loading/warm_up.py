"""First steps before anyone waits for them: what the profile does not go through is used for the first time here."""

import numpy as np

from services.decoder.worker.worker import Worker
from tessera.common.v1.pooling_pb2 import PooledRows, PoolingHead, PoolingParams
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult

_PROMPT = 16  # tokens
# What samples fail with whose logits are no numbers: here no request forbids tokens.
_NO_NUMBERS = ("NAN_LOGITS", "NO_TOKEN_LEFT")


class NotFinite(Exception):
    """The model gave no numbers."""


def warm_up(worker: Worker) -> None:
    """Runs a short prompt and a token of one sequence, or pools it, then forgets it. Block contents change. Raises
    NotFinite where logits are no numbers."""
    limits = worker.limits
    prompt = min(_PROMPT, limits.max_batched_tokens, limits.max_model_len - 1)
    results: list[StepResult] = []
    for step, plan in enumerate(_plans(prompt, worker), 1):
        plan.step = step
        worker.step(worker.accept(plan), results.append)
    for result in results:
        for failed in result.failed:
            if failed.failure.reason in _NO_NUMBERS:
                raise NotFinite
            raise RuntimeError(f"warm-up failed: {failed.failure.message}")
    worker.reset()


def _plans(prompt: int, worker: Worker) -> list[StepPlan]:
    blocks = -(-(prompt + 1) // worker.limits.block_size)
    greedy = SamplingParams(repetition_penalty=1, top_p=1, max_tokens=2)
    first = StepPlan(
        new=[NewSequence(slot=0, prompt_len=prompt, tokens=_ints(*[0] * prompt), sampling=greedy)],
        edit_slot=_ints(0),
        edit_index=_ints(0),
        edit_len=_ints(blocks),
        edit_blocks=_ints(*range(1, blocks + 1)),
    )
    _add_row(first, 0, prompt)
    if not worker.model.generates:
        first.new[0].pooling.CopyFrom(_row_itself(worker.model.config.hidden_size))
        first.pool_row, first.pool_slot = first.sample_row, first.sample_slot
        first.sample_row = first.sample_slot = b""
        return [first]
    second = StepPlan()
    _add_row(second, prompt, 1)
    return [first, second]


def _row_itself(width: int) -> PoolingParams:
    last, itself = PooledRows.POOLED_ROWS_LAST, PoolingHead.POOLING_HEAD_NONE
    return PoolingParams(rows=last, head=itself, width=width)


def _add_row(plan: StepPlan, start: int, count: int) -> None:
    plan.row_slot, plan.row_start, plan.row_count = _ints(0), _ints(start), _ints(count)
    plan.sample_row, plan.sample_slot = _ints(0), _ints(0)


def _ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()
