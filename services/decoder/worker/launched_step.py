"""A plan that is being computed."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from services.decoder.devices.base.staging import Download
from services.decoder.sampling.device_sampler import Draws
from services.decoder.worker.inputs import Batch, Flags, Longs
from services.decoder.worker.plan import Plan
from shared.errors import ServingError
from shared.telemetry.logs import Stopwatch
from tessera.decoder.v1.decoder_pb2 import StepResult, StepTimes

_NONE: Longs = np.zeros(0, np.int64)


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
    # Whether the device chooses the tokens: else it gives logits, and the host chooses.
    chosen_on_device: bool = False
    # Settings and numbers of the samples where not all of them take the largest logit, and the logits, for those that
    # the device cannot choose.
    draws: Draws | None = None
    logits: Tensor | None = None
    # float32 [T], finite where the hidden row is; then tokens int32 [samples] and their logits float32 [samples], or
    # logits float32 [samples, vocabulary].
    download: Download | None = None
    # Slots that a later plan has dropped: what this step finds out about them concerns nobody any more.
    dropped: set[int] = field(default_factory=set)
    # Rows of the plan whose sequences failed in a step before, after this one was launched.
    void: set[int] = field(default_factory=set)
    # Rows of the plan that ran on a token which the device could not choose.
    redo: set[int] = field(default_factory=set)

    @property
    def is_needed_whole(self) -> bool:
        """Whether the next step must not be launched before this one is collected: the host chooses its tokens."""
        return bool(self.reported) or (len(self.samples) > 0 and not self.chosen_on_device)

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
