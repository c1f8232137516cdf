"""The block tables of one decoder's sequences: what each holds, shares, and adds to the prefix cache."""

from services.scheduler.core.blocks import BlockManager
from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import PendingStep, StepPlan
from services.scheduler.core.sequence import Sequence


class BlockTables:
    """Changes the tables of running sequences. The plans tell the decoder."""

    def __init__(self, capacity: Capacity, blocks: BlockManager) -> None:
        self._capacity = capacity
        self._blocks = blocks
        # For the next plan.
        self._sealed_blocks: list[int] = []
        self._sealed_hashes: list[bytes] = []

    def find_cached(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence can begin with."""
        size, parts = self._capacity.block_size, self._capacity.parts
        if sequence.host_blocks:
            return self._blocks.find(sequence.block_hashes[: sequence.num_computed_tokens // size])
        if sequence.reads_prompt:
            return []
        # At least one token must be computed, or there would be no logits to sample from.
        usable = (sequence.num_tokens - 1) // size
        cached = self._blocks.find(sequence.block_hashes[:usable])
        return cached[: parts.begin(sequence, len(cached) * size, size) // size]

    def grow(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Appends free blocks to a sequence's table."""
        fresh = self._blocks.allocate(count)
        plan.edit(sequence.slot, len(sequence.blocks), fresh)
        sequence.blocks.extend(fresh)

    def is_shared(self, sequence: Sequence, index: int) -> bool:
        """Whether token `index` would be written into a partly filled block that forks hold too."""
        number, offset = divmod(index, self._capacity.block_size)
        return offset > 0 and self._blocks.refs(sequence.blocks[number]) > 1

    def copy_block(self, plan: StepPlan, sequence: Sequence, index: int) -> None:
        """Gives a sequence a copy of its own of the block that holds token `index`."""
        number = index // self._capacity.block_size
        shared = sequence.blocks[number]
        (own,) = self._blocks.allocate(1)
        plan.copy(shared, own)
        plan.edit(sequence.slot, number, [own])
        sequence.blocks[number] = own
        self._blocks.release([shared])

    def register(self, sequence: Sequence, step: PendingStep | None) -> None:
        """Adds blocks to the prefix cache whose every token is known and whose last one is computed in a plan already
        made, at the latest in this one.
        """
        computed = sequence.num_computed_tokens // self._capacity.block_size
        full = min(computed, len(sequence.block_hashes))
        if full <= sequence.num_registered:
            return
        made = sequence.blocks[sequence.num_registered : full]
        self._blocks.register(made, sequence.block_hashes[sequence.num_registered : full])
        sequence.num_registered = full
        if step is not None:
            step.cache_uses.append((sequence, made, True))

    def seal(self, sequence: Sequence, num_tokens: int) -> None:
        """Tells the decoder to keep the cached blocks among those that the first tokens of a sequence fill. These are
        known and were computed in steps that have been answered.
        """
        full = min(num_tokens // self._capacity.block_size, len(sequence.block_hashes))
        if full <= sequence.num_sealed:
            return
        blocks = sequence.blocks[sequence.num_sealed : full]
        for block, content in zip(blocks, self._blocks.contents(blocks), strict=True):
            if content is not None:
                self._sealed_blocks.append(block)
                self._sealed_hashes.append(content)
        sequence.num_sealed = full

    def put_sealed_into(self, plan: StepPlan) -> None:
        """What was sealed since the plan before."""
        plan.sealed_blocks, self._sealed_blocks = self._sealed_blocks, []
        plan.sealed_hashes, self._sealed_hashes = self._sealed_hashes, []

    def share(self, child: Sequence, parent: Sequence) -> None:
        """A fork begins with its parent's table, computed as far."""
        self._blocks.hold(parent.blocks)
        child.blocks = list(parent.blocks)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_registered = parent.num_registered
        child.num_media_passed = parent.num_media_passed

    def release(self, sequence: Sequence) -> None:
        """Empties a table. Its rows that are in flight count for nothing any more."""
        self._blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = sequence.num_sealed = 0
        sequence.generation += 1
