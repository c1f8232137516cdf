"""What a decision of the scheduler's core costs: microseconds for each sequence and step; the decoder costs nothing."""

import argparse
import time

from services.scheduler.core.plan import StepOutput
from services.scheduler.core.scheduler import Capacity, Scheduler
from services.scheduler.core.sequence import Sequence


def main(arguments: list[str]) -> None:
    """Prints the cost at several numbers of running sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(arguments).steps
    for running in (1, 32, 256):
        scheduler = Scheduler(Capacity(running * 64 + 1, 16, running, 1024, 2048))
        for number in range(running):
            prompt = [number] * 64
            scheduler.add(Sequence(f"r{number}", prompt, len(prompt), 900, arrival=number))
        spent, sequence_steps = 0.0, 0
        for step in range(steps):
            began = time.perf_counter()
            plan = scheduler.plan()
            assert plan is not None
            output = StepOutput([step] * len(plan.samples))
            scheduler.complete(output)
            if step > 20:  # prompts are behind
                spent += time.perf_counter() - began
                sequence_steps += len(plan.rows)
        print(
            f"{running:4} running: {1e6 * spent / sequence_steps:.2f} us for each sequence and step"
        )
