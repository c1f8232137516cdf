"""What the scheduler's core sends to a real worker, recorded, so that another worker can be given the same."""

import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.decoder.loading.load import Loaded
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.steps.step import Step
from services.decoder.worker.executor import Executor
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import Progress, StepOutput, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence as ScheduledSequence
from services.scheduler.decoders.convert import output_of
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1 import decoder_pb2
from tests.support.arithmetic.drive import DirectDecoder, Drive, capacity, sequence
from tests.support.decoder.step_stream import greedy

_PATIENCE_S = 60.0
# Settings of requests.
GREEDY: list[dict[str, Any]] = [{}]
DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.1},
]


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
        self.vectors = []
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
        self.vectors = [np.frombuffer(one, "<f4").tolist() for one in results[0].pooled]
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


def add_requests(
    scheduler: Scheduler,
    kinds: list[dict[str, Any]],
    numbers: random.Random,
    count: int,
    width: int = 0,
) -> dict[str, SamplingParams]:
    """Requests of these kinds, some with several choices, and, where hidden rows of a `width` are given, some that are
    pooled; their settings by id.
    """
    sampling = {}
    for index in range(count):
        name = f"r{index}"
        kind = numbers.choice(kinds)
        prompt = [numbers.randrange(400) for _ in range(numbers.randint(2, 70))]
        if width and numbers.random() < 0.2:
            sampling[name] = greedy(max_tokens=1)
            pooled = {"pooled_width": width, "reads_prompt": numbers.random() < 0.5}
            assert scheduler.add(sequence(name, prompt, 1, index, **pooled)) is None
            continue
        longest = numbers.randint(1, 30)
        sampling[name] = greedy(**kind, max_tokens=longest, seed=index)
        stops = frozenset(numbers.sample(range(400), numbers.choice([0, 40])))
        given = {
            "arrival": index,
            "num_logprobs": kind.get("logprobs", -1),
            "reads_prompt": "prompt_logprobs" in kind,
            "stop_token_ids": stops,
        }
        choices = 1 if given["reads_prompt"] else numbers.choice([1, 1, 1, 3])
        texts = [
            sequence(name, prompt, longest, choice=choice, **given) for choice in range(choices)
        ]
        assert scheduler.add(*texts) is None
    return sampling


def core(loaded: Loaded, **changes: Any) -> Capacity:
    """What the core plans with for a decoder, with steps of 48 tokens; `changes` are fields of it."""
    limits = loaded.worker.limits
    told = {
        "num_blocks": limits.num_blocks,
        "num_host_blocks": limits.num_host_blocks,
        "block_size": limits.block_size,
        "max_slots": limits.max_slots,
        "max_model_len": limits.max_model_len,
        "max_batched_tokens": 48,
    }
    return capacity(**{**told, **changes})
