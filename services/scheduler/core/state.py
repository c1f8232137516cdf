"""What the rooms of the core share: the sequences of one decoder, their blocks, slots and places in line."""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from services.scheduler.core.block_hash import extend_hashes
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.media import MediaState
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.policy import Policy
from services.scheduler.core.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the decoder said it is."""

    num_blocks: int
    block_size: int
    max_slots: int
    max_model_len: int
    max_batched_tokens: int

    @property
    def max_tokens_of_one(self) -> int:
        """The longest sequence that can ever run here."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)


class State:
    """Changed by the rooms in turn, within one call of the `Scheduler`."""

    def __init__(self, capacity: Capacity, policy: Policy, encoder_budget: int) -> None:
        self.capacity = capacity
        self.policy = policy
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self.media = MediaState(encoder_budget)
        self.waiting: list[Sequence] = []  # by rank
        self.running: dict[Sequence, None] = {}
        self.by_id: dict[tuple[str, int], Sequence] = {}
        self.free_slots = list(range(capacity.max_slots - 1, -1, -1))
        self.in_flight: deque[StepPlan] = deque()
        self.preemptions = 0
        # For the next plan.
        self.drops: list[int] = []
        self.sealed: list[tuple[int, bytes]] = []

    def enter(self, sequence: Sequence) -> None:
        """A sequence that is new here."""
        self.by_id[sequence.request_id, sequence.choice] = sequence
        extend_hashes(sequence, self.capacity.block_size)
        self.media.add(sequence)
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Queues by policy."""
        sequence.status = SequenceStatus.WAITING
        sequence.plain_until = 0
        insort(self.waiting, sequence, key=self.policy)

    def run(self, sequence: Sequence) -> None:
        """It has blocks from now on."""
        sequence.status = SequenceStatus.RUNNING
        self.running[sequence] = None

    def lose_blocks(self, sequence: Sequence) -> None:
        """A running sequence gives up its blocks and with them all that was computed."""
        del self.running[sequence]
        self._release(sequence)
        sequence.num_computed_tokens = 0
        self.media.restarted(sequence)
        self.wait(sequence)

    def introduce_again(self, sequence: Sequence) -> None:
        """Takes a running sequence off its slot: what the decoder has sampled for it since is not to be trusted."""
        for plan in self.in_flight:
            plan.disown(sequence)
        self.drops.append(sequence.slot)
        sequence.slot = -1
        sequence.num_tokens = len(sequence.tokens)
        self.lose_blocks(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forgets a sequence; the next plan tells the decoder."""
        if sequence.status is SequenceStatus.RUNNING:
            del self.running[sequence]
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
        sequence.ended = True
        if sequence.slot >= 0:
            self.drops.append(sequence.slot)
            sequence.slot = -1
        self.media.remove(sequence)
        del self.by_id[sequence.request_id, sequence.choice]

    def register(self, sequence: Sequence) -> None:
        """Makes blocks findable whose every token is known and whose last one is computed in a plan already made."""
        computed = sequence.num_computed_tokens // self.capacity.block_size
        full = min(computed, len(sequence.block_hashes))
        for index in range(sequence.num_registered, full):
            self.blocks.register(sequence.blocks[index], sequence.block_hashes[index])
        sequence.num_registered = max(sequence.num_registered, full)

    def seal(self, sequence: Sequence, num_tokens: int) -> None:
        """Tells the decoder which blocks are worth keeping, of a sequence whose first tokens are known and computed in
        steps that have been answered: the full ones that `find` returns."""
        full = min(num_tokens // self.capacity.block_size, len(sequence.block_hashes))
        for index in range(sequence.num_sealed, full):
            block = sequence.blocks[index]
            if self.blocks.is_cached(block):
                self.sealed.append((block, sequence.block_hashes[index]))
        sequence.num_sealed = max(sequence.num_sealed, full)

    def settle(self, sequence: Sequence) -> None:
        """After a commit: what has become full is hashed, findable and sealed."""
        size = self.capacity.block_size
        if sequence.status is SequenceStatus.RUNNING:
            extend_hashes(sequence, size)
            self.register(sequence)
            self.seal(sequence, len(sequence.tokens) - 1)
        sequence.set_watch(size)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = sequence.num_sealed = 0
        sequence.tenure += 1
