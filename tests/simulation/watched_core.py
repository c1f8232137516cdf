"""The scheduler's core, whose blocks, slots and sequences are checked for consistency after every call."""

from collections import Counter
from itertools import chain
from typing import Any

from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Ending, Sequence


def watched(world: Any) -> type[Scheduler]:
    """A scheduler core that reports inconsistencies to the world."""

    class WatchedScheduler(Scheduler):
        def add(self, sequence: Sequence, *siblings: Sequence) -> Ending | None:
            ending = super().add(sequence, *siblings)
            self._look()
            return ending

        def cancel(self, request_id: str) -> list[Sequence]:
            ended = super().cancel(request_id)
            self._look()
            return ended

        def complete(self, output: StepOutput) -> StepProgress:
            progress = super().complete(output)
            self._look()
            return progress

        def plan(self) -> StepPlan | None:
            plan = super().plan()
            if plan is not None:
                world.planned(plan)
            self._look()
            return plan

        def _look(self) -> None:
            for problem in problems(self):
                world.broken(f"core of {world.process()}: {problem}")

    return WatchedScheduler


def problems(core: Scheduler) -> list[str]:
    """The inconsistencies found, in words."""
    found = []
    held = Counter(chain.from_iterable(sequence.blocks for sequence in core.state.running))
    blocks = core.state.blocks
    refs = map(blocks.refs, range(1, blocks.num_total + 1))
    for block, count in enumerate(refs, 1):
        if count != held.get(block, 0):
            found.append(f"block {block} counts {count}, is held {held[block]} times")
    if blocks.num_used != len(held):
        found.append(f"{blocks.num_used} blocks count as used, {len(held)} are held")
    slots = [sequence.slot for sequence in core.state.sequences() if sequence.slot >= 0]
    if len(set(slots)) != len(slots):
        found.append(f"a slot has two sequences: {slots}")
    if len(core.state.sequences()) != core.state.num_sequences:
        found.append(
            f"{core.state.num_sequences} sequences are counted, {len(core.state.sequences())} there"
        )
    return found
