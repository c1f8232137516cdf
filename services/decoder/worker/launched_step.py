"""A plan that is being computed."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from services.decoder.devices.base.staging import Download
from services.decoder.sampling.choices import LogIds
from services.decoder.sampling.device_sampler import Draws
from services.decoder.sampling.split import Split
from services.decoder.worker.inputs.rows import Flags, Longs
from services.decoder.worker.inputs.step_inputs import Batch
from services.decoder.worker.plans.plan import Plan
from services.decoder.worker.pooling import PooledRow
from shared.errors import ServingError
from shared.telemetry.logs import Stopwatch
from tessera.decoder.v1.decoder_pb2 import StepResult, StepTimes

_NONE: Longs = np.zeros(0, np.int64)
_NOBODY: LogIds = np.zeros(0, np.int32)
_NO_SAMPLES = Split.largest(0)


@dataclass(eq=False)
class LaunchedStep:
    """From `Worker.launch` to `Worker.collect`. Its tensors are on the device."""

    plan: Plan
    result: StepResult
    watch: Stopwatch
    times: StepTimes
    failed: dict[int, ServingError] = field(default_factory=dict)  # by row of the plan
    batch: Batch | None = None  # None if no row runs
    is_replayed: bool = False  # by a graph: the batch has as many rows as one
    hidden: Tensor | None = None  # [T, H]
    samples: Longs = field(default_factory=lambda: _NONE)  # of the plan, that are computed
    owners: Longs = field(default_factory=lambda: _NONE)  # the slot of each
    # Rows of the batch whose prompts' log-probabilities are reported.
    reported: list[int] = field(default_factory=list)
    # Rows of which something is pooled.
    pooled: Sequence[PooledRow] = ()
    # By sample: tokens that its sequence has generated before, and where the next one is chosen.
    positions: Longs = field(default_factory=lambda: _NONE)
    # By sample of the plan, see `Sampler.wanted_logprobs`; empty where none asks for any.
    wanted_logprobs: LogIds = field(default_factory=lambda: _NOBODY)
    takes_all: bool = False  # a token is chosen behind each token of the batch, in their order
    late: "Sequence[Future[Any]]" = ()  # what is being prepared that the choice needs
    split: Split = _NO_SAMPLES
    # Settings and numbers of the samples where the device draws some of them, and the logits, for those that it cannot
    # choose.
    draws: Draws | None = None
    logits: Tensor | None = None
    last: Tensor | None = None  # [samples, H] where the largest logit of some is guessed to decide
    # float32 [T], finite where the hidden row is; then what `SampleArrays` says, then what `Pooling.submit` does.
    download: Download | None = None
    # Slots that a later plan has dropped: what this step finds out about them concerns nobody any more.
    dropped: set[int] = field(default_factory=set)
    # Rows of the plan whose sequences failed in a step before, after this one was launched.
    void: set[int] = field(default_factory=set)
    # Rows of the plan that ran on a token which the device could not choose.
    redo: set[int] = field(default_factory=set)

    def must_precede(self, plan: Plan) -> bool:
        """Whether a plan must not be launched before this step is collected: because it goes on with a token that the
        host chooses, or ends such a sequence, or changes one with drafts here, or this step reports on prompts."""
        if self.plan.drafts is not None:
            named = [
                plan.row_slot,
                plan.fork_parent,
                plan.set_token_slot,
                plan.edit_slot,
                plan.drop,
            ]
            if np.isin(self.plan.drafts.slots, np.concatenate(named)).any():
                return True
        if self.reported or self.split.is_plain:
            return bool(self.reported)
        chosen = self.owners[~self.split.on_device]
        if not len(chosen):
            return False
        used = (plan.row_slot, plan.fork_parent, plan.set_token_slot, plan.drop)
        return bool(np.isin(chosen, np.concatenate(used)).any())

    def are_dropped(self, slots: Longs) -> Flags:
        """Which of the slots a later plan has dropped."""
        return np.isin(slots, list(self.dropped))

    def overwrites(self, places: Longs, block_size: int) -> Flags:
        """Which places of the cache (block * block_size + offset) hold something else since this step."""
        blocks = np.concatenate([self.plan.copy_dst, self.plan.swap_in_device])
        found = np.isin(places // block_size, blocks)
        if self.batch is not None:
            found |= np.isin(places, self.batch.written)
        return found
