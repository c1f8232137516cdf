"""What the rooms of the core share: the sequences of one decoder, their blocks, slots and places in line."""

from bisect import insort
from collections import deque

from services.scheduler.core.blocks import BlockManager, HostBlocks, extend_hashes
from services.scheduler.core.budget import Capacity
from services.scheduler.core.media import MediaState
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Policy, Sequence, SequenceStatus
from services.scheduler.core.turns import Turns


class State:
    """Changed by the rooms in turn, within one call of the `Scheduler`."""

    def __init__(self, capacity: Capacity, policy: Policy, encoder_budget: int) -> None:
        self.capacity = capacity
        self.policy = policy
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self.host = HostBlocks(capacity.num_host_blocks)
        self.media = MediaState(encoder_budget)
        self.turns = Turns()
        self.waiting: list[Sequence] = []  # by rank
        self.running: dict[Sequence, None] = {}
        self.requests: dict[str, list[Sequence]] = {}  # those that have not ended
        self.num_sequences = 0
        self.free_slots = list(range(capacity.max_slots - 1, -1, -1))
        self.in_flight: deque[StepPlan] = deque()
        self.preemptions = 0
        self.swaps = 0
        # For the next plan.
        self.drops: list[int] = []
        self.host_releases: list[int] = []
        self.drops_of_beams: list[int] = []  # slots that stay with their search
        self.forks: list[tuple[Sequence, Sequence]] = []  # child, parent
        self.tokens: list[
            tuple[Sequence, int]
        ] = []  # that take the place of what the decoder chose
        self.sealed_blocks: list[int] = []
        self.sealed_hashes: list[bytes] = []

    def enter(self, sequence: Sequence) -> None:
        """A sequence that is new here, with its pending forks."""
        extend_hashes(sequence, self.capacity.block_size)
        for one in (sequence, *sequence.forks):
            self.know(one)
            one.status = SequenceStatus.PENDING
        self.media.add(sequence)
        self.wait(sequence)

    def know(self, sequence: Sequence) -> None:
        """Counts a sequence in."""
        self.requests.setdefault(sequence.request_id, []).append(sequence)
        self.turns.enter(sequence)
        self.num_sequences += 1

    def has_slots(self, sequence: Sequence) -> bool:
        """Whether a sequence and what will be forked from it have slots, or can have them."""
        if sequence.beams is not None:
            enough = len(self.free_slots) >= sequence.beams.num_beams
            return enough or self.holds_slots(sequence)
        return len(self.free_slots) >= len(self._without_slot(sequence))

    def holds_slots(self, sequence: Sequence) -> bool:
        """Whether it or what will be forked from it has some since an earlier start."""
        if sequence.beams is not None:
            return sequence.slot >= 0 or bool(sequence.beams.spare_slots)
        return any(s.slot >= 0 for s in (sequence, *sequence.forks))

    def take_slots(self, sequence: Sequence) -> None:
        """Gives them out; a beam search gets all that it will ever need."""
        if sequence.beams is not None:
            spare = sequence.beams.spare_slots
            if not spare:
                spare += [self.free_slots.pop() for _ in range(sequence.beams.num_beams)]
            sequence.slot = spare.pop()
            return
        for one in self._without_slot(sequence):
            one.slot = self.free_slots.pop()

    def _without_slot(self, sequence: Sequence) -> list[Sequence]:
        return [s for s in (sequence, *sequence.forks) if s.slot < 0 and not s.ended]

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

    def park(self, sequence: Sequence, host_blocks: list[int]) -> None:
        """A running sequence gives up its blocks; what was computed is kept in host memory."""
        del self.running[sequence]
        self._release(sequence)
        sequence.host_blocks = host_blocks
        self.wait(sequence)

    def introduce_again(self, sequence: Sequence) -> None:
        """Takes a sequence off its slot: what the decoder has sampled for it since is not to be trusted."""
        for plan in self.in_flight:
            plan.disowned.add(sequence)
        if sequence.beams is not None:
            sequence.beams.forget_answer(sequence)
        self._drop(sequence)
        sequence.num_tokens = len(sequence.tokens)
        if sequence.status is SequenceStatus.RUNNING:
            self.lose_blocks(sequence)
        else:
            self.host.release(sequence.host_blocks)
            sequence.host_blocks = []
            sequence.num_computed_tokens = 0
            self.media.restarted(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forgets a sequence; the next plan tells the decoder."""
        if sequence.status is SequenceStatus.RUNNING:
            del self.running[sequence]
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.host.release(sequence.host_blocks)
        if sequence.slot >= 0:
            if sequence.status is SequenceStatus.PENDING:  # the decoder does not know it yet
                self.free_slots.append(sequence.slot)
                sequence.slot = -1
            else:
                self._drop(sequence)
        sequence.status = SequenceStatus.ENDED
        sequence.ended = sequence.is_special = True
        self.media.remove(sequence)
        self.turns.leave(sequence)
        siblings = self.requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request_id]
        self.num_sequences -= 1

    def _drop(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            if sequence.beams is not None and not sequence.beams.done:
                self.drops_of_beams.append(sequence.slot)
                sequence.beams.spare_slots.append(sequence.slot)
            else:
                self.drops.append(sequence.slot)
            sequence.slot = -1

    def register(self, sequence: Sequence, plan: StepPlan | None) -> None:
        """Makes blocks findable whose every token is known and whose last one is computed in a plan already made, at
        the latest in this one."""
        computed = sequence.num_computed_tokens // self.capacity.block_size
        full = min(computed, len(sequence.block_hashes))
        if full <= sequence.num_registered:
            return
        made = sequence.blocks[sequence.num_registered : full]
        self.blocks.register(made, sequence.block_hashes[sequence.num_registered : full])
        sequence.num_registered = full
        if plan is not None:
            plan.origins.append((sequence, made, True))

    def seal(self, sequence: Sequence, num_tokens: int) -> None:
        """Tells the decoder which blocks are worth keeping, of a sequence whose first tokens are known and computed in
        steps that have been answered: the full ones that `find` returns."""
        full = min(num_tokens // self.capacity.block_size, len(sequence.block_hashes))
        if full <= sequence.num_sealed:
            return
        blocks = sequence.blocks[sequence.num_sealed : full]
        for block, content in zip(blocks, self.blocks.contents(blocks), strict=True):
            if content is not None:
                self.sealed_blocks.append(block)
                self.sealed_hashes.append(content)
        sequence.num_sealed = full

    def settle(self, sequence: Sequence) -> None:
        """After a commit: what has become full is hashed, findable and sealed."""
        size = self.capacity.block_size
        if sequence.status is SequenceStatus.RUNNING:
            extend_hashes(sequence, size)
            self.register(sequence, self.in_flight[-1] if self.in_flight else None)
            self.seal(sequence, len(sequence.tokens) - 1)
        sequence.set_watch(size)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = sequence.num_sealed = 0
        sequence.tenure += 1
