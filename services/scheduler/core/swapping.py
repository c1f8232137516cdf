"""Blocks that are moved to the decoder's host memory and back."""

from services.scheduler.core.blocks import BlockManager, HostBlocks
from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence


class Swapping:
    """Moves what sequences have computed. `host` has the blocks of host memory."""

    def __init__(self, capacity: Capacity, blocks: BlockManager) -> None:
        self.host = HostBlocks(capacity.num_host_blocks)
        self._capacity = capacity
        self._blocks = blocks
        self._releases: list[int] = []  # with the next plan

    @property
    def num_releases(self) -> int:
        """Host blocks that become free with the next plan: their content may still be moving."""
        return len(self._releases)

    def swap_out(self, plan: StepPlan, sequence: Sequence) -> None:
        """Saves what a sequence has computed; its table is left as it is."""
        blocks = sequence.blocks[: self._capacity.blocks_for(sequence.num_computed_tokens)]
        sequence.host_blocks = self.host.allocate(len(blocks))
        plan.swap_out_device += blocks
        plan.swap_out_host += sequence.host_blocks

    def swap_in(self, plan: StepPlan, sequence: Sequence) -> None:
        """Moves back, behind the table's blocks, what is not cached on the device."""
        swapped = sequence.host_blocks[len(sequence.blocks) :]
        fresh = self._blocks.allocate(len(swapped))
        plan.swap_in_host += swapped
        plan.swap_in_device += fresh
        sequence.blocks += fresh
        # A plan swaps out before it swaps in: only the next one may overwrite these.
        self._releases += sequence.host_blocks
        sequence.host_blocks = []

    def forget(self, sequence: Sequence) -> None:
        """A sequence needs nothing of what it has in host memory."""
        self.host.release(sequence.host_blocks)
        sequence.host_blocks = []

    def share(self, child: Sequence, parent: Sequence) -> None:
        """A fork holds what its parent has in host memory."""
        child.host_blocks = list(parent.host_blocks)
        self.host.hold(child.host_blocks)

    def begin_step(self) -> None:
        """What was moved back in the plan before is free in this one."""
        if self._releases:
            self.host.release(self._releases)
            self._releases = []
