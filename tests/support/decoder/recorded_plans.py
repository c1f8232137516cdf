"""What the scheduler's core sends to a real worker, recorded, so that another worker can be given the same."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.decoder.loading.load import Loaded
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.step import Step
from services.decoder.worker.executor import Executor
from services.decoder.worker.plan import read_plan
from services.decoder.worker.worker import Worker
from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import Progress, StepOutput, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence as ScheduledSequence
from services.scheduler.decoders.convert import output_of
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1 import decoder_pb2
from tests.support.arithmetic.drive import DirectDecoder, Drive

_PATIENCE_S = 60.0


@dataclass
class Recording:
    """Plans as they were sent, and their results without times."""

    plans: list[bytes] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)

    def take(self, result: decoder_pb2.StepResult) -> None:
        """Adds a result."""
        kept = decoder_pb2.StepResult()
        kept.CopyFrom(result)
        kept.ClearField("times")
        self.results.append(kept.SerializeToString(deterministic=True))


class RecordedDecoder(DirectDecoder):
    """A real worker in the place of the arithmetic one, which takes each plan to its end at once."""

    def __init__(
        self, capacity: Capacity, worker: Worker, sampling: dict[str, SamplingParams]
    ) -> None:
        """sampling: settings by the request's id."""
        self.capacity, self.limits = capacity, worker.limits
        self.recording = Recording()
        self._real = worker
        self._sampling = sampling

    def run(
        self,
        plan: StepPlan,
        restarted: Collection[ScheduledSequence] = (),
        failing_rows: Collection[int] = (),
    ) -> StepOutput:
        """Runs and records one plan."""
        message = self._message(plan)
        results: list[decoder_pb2.StepResult] = []
        self.recording.plans.append(message.SerializeToString())
        self._real.step(read_plan(message, self.limits), results.append)
        self.recording.take(results[0])
        return output_of(plan, results[0])

    def _new_sequence(self, slot: int, new: ScheduledSequence) -> decoder_pb2.NewSequence:
        message = super()._new_sequence(slot, new)
        message.choice = new.choice
        message.sampling.MergeFrom(self._sampling[new.request_id])
        return message


class RecordedDrive(Drive):
    """Runs the core's plans, one ahead, on a real worker."""

    def __init__(
        self, scheduler: Scheduler, loaded: Loaded, sampling: dict[str, SamplingParams]
    ) -> None:
        super().__init__(scheduler)
        self.decoder = RecordedDecoder(scheduler.capacity, loaded.worker, sampling)
        self.recording = self.decoder.recording

    def _expected(self, progress: Progress) -> int:
        """Whatever the model gives."""
        assert progress.token is not None
        return progress.token


def replay(worker: Worker, plans: Sequence[bytes]) -> list[bytes]:
    """Results of plans that are launched one ahead and collected on another thread. As the scheduler sends them: a plan
    leaves when the one before the last is answered.
    """
    found = Recording()
    may_leave = threading.Semaphore(2)
    collector = Executor("collect")

    def deliver(result: decoder_pb2.StepResult) -> None:
        found.take(result)
        may_leave.release()

    for data in plans:
        assert may_leave.acquire(timeout=_PATIENCE_S), "a step was not collected"
        plan = read_plan(decoder_pb2.StepPlan.FromString(data), worker.limits)
        step = worker.launch(plan)
        collector.submit(lambda step=step: worker.collect(step, deliver))  # type: ignore[misc]
    for _ in range(2):
        assert may_leave.acquire(timeout=_PATIENCE_S), "a step was not collected"
    collector.stop()
    return found.results


def poison(model: DecoderModel, bad: Collection[tuple[int, int]]) -> None:
    """From now on rows of (slot, number of tokens) give what is not a number, and leave that in the cache."""
    inner = model.forward

    def forward(hidden: Tensor, step: Step, caches: Any) -> Tensor:
        for row, (slot, length) in enumerate(zip(step.slots, step.meta.kv_lens, strict=True)):
            if (slot, length) in bad:
                hidden[step.meta.cu_q[row] : step.meta.cu_q[row + 1]] = torch.nan
        return inner(hidden, step, caches)

    setattr(model, "forward", forward)  # noqa: B010
