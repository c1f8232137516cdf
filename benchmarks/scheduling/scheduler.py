"""What the scheduler costs: the core's decisions for each sequence and step, and a step of the whole process.

The decoder and Redis cost nothing here; everything is processor time.
"""

import argparse
import logging
import time
from array import array
from collections.abc import Iterable

import structlog

from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.decoders import convert
from services.scheduler.decoders.step_statistics import StepStatistics
from services.scheduler.decoders.step_trace import StepTrace
from services.scheduler.output.request import Request
from services.scheduler.requests.output_tracker import OutputTracker
from shared.queue import TakenRequest
from shared.queue.keys import new_request_id
from shared.queue.registry import Member
from shared.telemetry.timeline import Timelines
from shared.text.text_fold import TokenBytes
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import Hello, StepResult
from tessera.scheduler.v1.queue_pb2 import RequestSpec

_PROMPT = 64
_WARM = 50  # steps until prompts are behind


def main(arguments: list[str]) -> None:
    """Prints both at several numbers of running sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 32, 256, 1024])
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    for running in options.running:
        core = measure(running, options.steps)
        process = measure_process(running, options.steps)
        print(
            f"{running:4} running: core {core:.2f} us for each sequence and step,"
            f" process {process / 1000:.3f} ms a step"
        )


def measure(running: int, steps: int) -> float:
    """Microseconds in plan() and complete() together for each sequence and step, one plan ahead."""
    scheduler = Scheduler(_capacity(running))
    for number in range(running):
        prompt = [number] * _PROMPT
        scheduler.add(Sequence(f"r{number}", prompt, len(prompt), 900, arrival=number))
    spent, sequence_steps = 0.0, 0
    waiting = [scheduler.plan()]
    for step in range(steps + _WARM):
        began = time.process_time()
        waiting.append(scheduler.plan())
        spent_planning = time.process_time() - began
        plan = waiting.pop(0)
        assert plan is not None
        output = StepOutput([step] * len(plan.sample_slot))
        began = time.process_time()
        scheduler.complete(output)
        if step >= _WARM:
            spent += spent_planning + time.process_time() - began
            sequence_steps += len(plan.row_slot)
    return 1e6 * spent / sequence_steps


def measure_process(running: int, steps: int) -> float:
    """Microseconds of a step from the result's bytes to those of the next plan and of the log call."""
    scheduler = Scheduler(_capacity(running))
    writer = _Writer()
    timelines = Timelines("scheduler", "")
    tracker = OutputTracker(writer, lambda: None, timelines)  # type: ignore[arg-type]
    link = _Link(scheduler, timelines)
    capacity = scheduler.capacity
    table = TokenBytes([b"a"], [False])
    for number in range(running):
        tracker.accept(link, Request(_taken(number), table))  # type: ignore[arg-type]
    in_flight: list[StepPlan] = []
    spent, counted = 0.0, 0
    for step in range(steps + _WARM):
        if not in_flight:
            in_flight.append(_next(scheduler))
        result = _answer(in_flight[0], step)
        began = time.process_time()
        answer = StepResult.FromString(result)
        plan = in_flight.pop(0)
        progress = scheduler.complete(convert.output_of(plan, answer))
        following = _next(scheduler)
        convert.plan_message(following, 1, capacity).SerializeToString()
        tracker.on_step(progress, plan, answer)
        writer.take()
        if step >= _WARM:
            spent += time.process_time() - began
            counted += 1
        in_flight.append(following)
    return 1e6 * spent / counted


class _Link:
    """What the tracker touches of a decoder link."""

    def __init__(self, core: Scheduler, timelines: Timelines) -> None:
        self.core = core
        self.trace = StepTrace(timelines, "decoder", StepStatistics())
        self.member = Member("decoder", "")
        self.hello = Hello(row_invariant=True)


class _Writer:
    """Puts batches together as the log writer does, and forgets them."""

    def __init__(self) -> None:
        self._batches: list[bytes] = []
        self._choices: list[object] = []

    def submit(
        self, batch: bytes, choices: list[object], noted: Iterable[tuple[str, str]] = ()
    ) -> None:
        """See `LogWriter.submit`."""
        self._batches.append(batch)
        self._choices += choices

    def take(self) -> bytes:
        """The argument of the script."""
        batch = b"".join(self._batches)
        self._batches, self._choices = [], []
        return batch


def _capacity(running: int) -> Capacity:
    return Capacity(running * 64 + 1, 16, running, 1024, 2048)


def _next(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def _answer(plan: StepPlan, step: int) -> bytes:
    tokens = array("i", [step % 900] * len(plan.sample_slot))
    return StepResult(lease=1, step=plan.step, tokens=tokens.tobytes()).SerializeToString()


def _taken(number: int) -> TakenRequest:
    spec = RequestSpec(
        request_id=new_request_id("01234567"),
        prompt=array("i", [number] * _PROMPT).tobytes(),
        sampling=SamplingParams(n=1, best_of=1, max_tokens=900, stop_token_ids=[901]),
    )
    return TakenRequest(spec, 1, number, (b"",), (None,))
