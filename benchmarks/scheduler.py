"""What a decision of the scheduler's core costs: microseconds for each sequence and step; the decoder costs nothing."""

import argparse
import time

from services.scheduler.core.plan import StepOutput
from services.scheduler.core.scheduler import Capacity, Scheduler
from services.scheduler.core.sequence import Sequence


def main(arguments: list[str]) -> None:
    """Prints the cost at several numbers of running sequences, in processor time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 32, 256, 1024])
    options = parser.parse_args(arguments)
    for running in options.running:
        cost = measure(running, options.steps)
        print(f"{running:4} running: {cost:.2f} us for each sequence and step")


def measure(running: int, steps: int) -> float:
    """Microseconds in plan() and complete() together for each sequence and step, one plan ahead."""
    scheduler = Scheduler(Capacity(running * 64 + 1, 16, running, 1024, 2048))
    for number in range(running):
        prompt = [number] * 64
        scheduler.add(Sequence(f"r{number}", prompt, len(prompt), 900, arrival=number))
    spent, sequence_steps = 0.0, 0
    waiting = [scheduler.plan()]
    for step in range(steps + 50):
        began = time.process_time()
        waiting.append(scheduler.plan())
        spent_planning = time.process_time() - began
        plan = waiting.pop(0)
        assert plan is not None
        output = StepOutput([step] * len(plan.sample_slot))
        began = time.process_time()
        scheduler.complete(output)
        if step >= 50:  # prompts are behind
            spent += spent_planning + time.process_time() - began
            sequence_steps += len(plan.row_slot)
    return 1e6 * spent / sequence_steps
