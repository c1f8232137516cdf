"""What the scheduler knows of one decoder: its sequences, what they hold there, and plans that are not answered yet."""

from bisect import insort
from collections import deque

from services.scheduler.core.adapters import AdapterPlaces
from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.block_tables import BlockTables
from services.scheduler.core.blocks import BlockManager, extend_hashes
from services.scheduler.core.budget import Capacity
from services.scheduler.core.encoder_blocks import EncoderBlocks
from services.scheduler.core.media import MediaState
from services.scheduler.core.plan import PendingStep, StepPlan
from services.scheduler.core.sequence import Isolation, Policy, Sequence, SequenceStatus
from services.scheduler.core.slots import Slots
from services.scheduler.core.swapping import Swapping


class DecoderState:
    """The one owner of the sequences of a decoder and of what they have: slots, tables of blocks, what is in host
    memory, embeddings. The `Scheduler` and its `Planner` decide; only the methods here change where a sequence is.
    """

    def __init__(self, capacity: Capacity, policy: Policy, encoder_budget: int) -> None:
        self.capacity = capacity
        self.policy = policy
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self.tables = BlockTables(capacity, self.blocks)
        self.swapping = Swapping(capacity, self.blocks)
        keys = EncoderBlocks(capacity.num_encoder_blocks, capacity.block_size)
        self.slots = Slots(capacity.max_slots, keys)
        self.media = MediaState(encoder_budget, all_first=capacity.num_encoder_blocks > 0)
        self.adapters = AdapterPlaces(capacity.adapters, capacity.max_adapters, policy)
        self.isolation = Isolation()
        self.waiting: list[Sequence] = []  # without blocks, by rank
        self.running: dict[Sequence, None] = {}  # with blocks
        self.num_sequences = 0  # that have not ended
        self.in_flight: deque[PendingStep] = deque()
        self.steps = 0  # plans made so far
        self.preemptions = 0
        self.recomputations = 0  # of sequences that had output
        self.swaps = 0  # preemptions whose blocks went to host memory
        self._requests: dict[str, list[Sequence]] = {}  # sequences that have not ended
        # For the next plan.
        self._beam_forks: list[tuple[Sequence, Sequence]] = []  # child, parent
        self._beam_tokens: list[tuple[Sequence, int]] = []  # replace what the decoder sampled

    # Questions

    def find(self, request_id: str, choice: int = 0) -> Sequence | None:
        """A sequence that has not ended."""
        for sequence in self._requests.get(request_id, ()):
            if sequence.choice == choice:
                return sequence
        return None

    def choices(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended."""
        return list(self._requests.get(request_id, ()))

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [s for choices in self._requests.values() for s in choices]

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence that has not started has its adapter and all embeddings."""
        return self.has_media(sequence) and self.adapters.has(sequence.lora_id)

    def has_media(self, sequence: Sequence) -> bool:
        """Whether a sequence that has not started has all embeddings."""
        return self.media.plannable(sequence, 0) == sequence.num_tokens

    @property
    def num_ready_to_start(self) -> int:
        """Waiting sequences that lack only blocks, slots or step budget."""
        return sum(1 for s in self.waiting if self.is_ready(s))

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens yet to compute of sequences that lack only room, prefixes that may be cached included, and of running
        ones as far as their embeddings are there."""
        ready = (s for s in self.waiting if self.is_ready(s))
        begun = (self.media.plannable(s, s.num_computed_tokens) for s in self.running)
        return sum(s.num_tokens for s in ready) + sum(n for n in begun if n > 1)

    # Plans

    def begin_step(self) -> PendingStep:
        """A new plan with all that has piled up for the decoder since the last one."""
        plan = StepPlan(self.steps + 1)
        self.slots.put_drops_into(plan)
        self.swapping.begin_step()
        if self._beam_tokens:
            self._put_beams_into(plan)
        plan.fetch = self.media.take_fetches()
        plan.release = self.media.take_releases()
        self.adapters.put_into(plan, self.waiting, self.running)
        return PendingStep(plan)

    def send(self, step: PendingStep) -> None:
        """The plan is complete and goes to the decoder."""
        plan = step.plan
        self.tables.put_sealed_into(plan)
        self.steps += 1
        self.in_flight.append(step)

    def _put_beams_into(self, plan: StepPlan) -> None:
        for child, parent in self._beam_forks:
            if child.ended:
                continue
            if parent.slot < 0:  # restarted meanwhile: the decoder has nothing to fork from
                self.restart(child)
                continue
            plan.fork(child, parent)
        for beam, token in self._beam_tokens:
            if beam.slot >= 0:
                plan.set_token_slot.append(beam.slot)
                plan.set_token.append(token)
        self._beam_forks, self._beam_tokens = [], []

    # From arrival to ending

    def add(self, sequence: Sequence) -> None:
        """A new sequence, with its pending forks."""
        extend_hashes(sequence, self.capacity)
        for one in (sequence, *sequence.forks):
            self._enter(one)
            one.status = SequenceStatus.PENDING
        self.media.add(sequence)
        self._wait(sequence)

    def _enter(self, sequence: Sequence) -> None:
        self._requests.setdefault(sequence.request_id, []).append(sequence)
        self.isolation.add(sequence)
        self.num_sequences += 1

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        sequence.plain_until = sequence.num_drafts = 0
        insort(self.waiting, sequence, key=self.policy)
        self.adapters.ask(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running[sequence] = None

    def start(
        self, step: PendingStep, sequence: Sequence, cached: list[int], num_computed: int
    ) -> None:
        """A waiting sequence runs from index `num_computed` on: it holds the cached blocks, and those that are moved
        back from host memory. The caller takes it out of `waiting`.
        """
        self.blocks.hold(cached)
        if sequence.slot < 0:
            self.slots.take(sequence)
            step.plan.new.append((sequence.slot, sequence))
            sequence.num_cached_tokens = min(num_computed, sequence.prompt_len)
            self.blocks.queries += sequence.num_tokens // self.capacity.block_size
            self.blocks.hits += len(cached)
        sequence.blocks = list(cached)
        if cached:
            step.cache_uses.append((sequence, cached, False))
        if sequence.host_blocks:
            self.swapping.swap_in(step.plan, sequence)
        sequence.num_computed_tokens = num_computed
        sequence.num_registered = sequence.num_sealed = len(cached)
        step.plan.edit(sequence.slot, 0, sequence.blocks)
        self.adapters.use(sequence.lora_id)
        self._run(sequence)
        self.media.computed(sequence, num_computed)

    def preempt(self, plan: StepPlan, sequence: Sequence, *, swap: bool) -> None:
        """A running sequence gives up its blocks and waits again; history and slot are kept. With `swap` what was
        computed is saved in host memory, else it is computed again.
        """
        self.preemptions += 1
        sequence.num_preemptions += 1
        self.update_cache(sequence)  # it may find again what it gives up
        if swap:
            self.swaps += 1
            self.swapping.swap_out(plan, sequence)
            self._release_blocks(sequence)
            self._wait(sequence)
        else:
            self._lose_blocks(sequence)
        plan.edit(sequence.slot, 0, [])

    def restart(self, sequence: Sequence) -> None:
        """Drops a sequence's slot and blocks; it waits to be computed again from its committed tokens. What plans in
        flight sample for it is discarded.
        """
        for step in self.in_flight:
            step.restarted.add(sequence)
        if sequence.beams is not None:
            sequence.beams.forget_answer(sequence)
        self.slots.drop(sequence)
        sequence.num_tokens, sequence.slack = len(sequence.tokens), 0
        if sequence.status is SequenceStatus.RUNNING:
            self._lose_blocks(sequence)
        else:
            self.swapping.forget(sequence)
            self._compute_again(sequence)

    def restart_dependents(self, step: PendingStep, row: int, failed: list[Sequence]) -> None:
        """A row was not computed, and so nothing that depends on it is right, in this plan and in those after it: such
        blocks leave the prefix cache, and sequences that have found them restart. Sequences that have ended meanwhile
        are followed too, because they left blocks behind.
        """
        doubtful = dict.fromkeys([step.plan.row_sequence[row], *failed])
        wrong: set[int] = set()
        for pending in self.in_flight:
            for sequence, blocks, added in pending.cache_uses:
                if added and sequence in doubtful:
                    wrong.update(blocks)
                elif not added and not wrong.isdisjoint(blocks):
                    doubtful[sequence] = None
            # Choices that were forked from a doubtful row share its blocks.
            plan = pending.plan
            for of, sequence in zip(plan.sample_row, plan.sample_sequence, strict=True):
                if plan.row_sequence[of] in doubtful:
                    doubtful[sequence] = None
        for block in wrong:
            self.blocks.forget(block)
        for sequence in doubtful:
            if not sequence.ended and sequence not in failed and sequence not in step.restarted:
                self.restart(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forgets a sequence; the next plan tells the decoder."""
        if sequence.status is SequenceStatus.RUNNING:
            self._release_blocks(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.swapping.forget(sequence)
        if sequence.status is SequenceStatus.PENDING:
            self.slots.take_back(sequence)
        else:
            self.slots.drop(sequence)
        sequence.status = SequenceStatus.ENDED
        sequence.ended = sequence.is_special = True
        self.media.remove(sequence)
        self.isolation.remove(sequence)
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]
        self.num_sequences -= 1

    def _lose_blocks(self, sequence: Sequence) -> None:
        self._release_blocks(sequence)
        self._compute_again(sequence)
        self._wait(sequence)

    def _compute_again(self, sequence: Sequence) -> None:
        sequence.num_computed_tokens = 0
        if sequence.num_output_tokens:
            sequence.was_recomputed = True
            self.recomputations += 1
        self.media.restarted(sequence)

    def _release_blocks(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.tables.release(sequence)

    def update_cache(self, sequence: Sequence) -> None:
        """After a commit: hashes, caches and seals the blocks that have become full."""
        size = self.capacity.block_size
        if sequence.status is SequenceStatus.RUNNING:
            extend_hashes(sequence, self.capacity)
            self.tables.register(sequence, self.in_flight[-1] if self.in_flight else None)
            self.tables.seal(sequence, len(sequence.tokens) - 1)
        sequence.set_watch(size)

    # Forks

    def fork_choice(self, plan: StepPlan, child: Sequence, parent: Sequence) -> None:
        """A pending sibling runs with the blocks of the sequence that has computed their prompt."""
        plan.fork(child, parent)
        plan.edit(child.slot, 0, parent.blocks)
        self.tables.share(child, parent)
        child.block_hashes = list(parent.block_hashes)
        child.num_sealed = parent.num_registered
        child.num_cached_tokens = parent.num_cached_tokens
        self._run(child)

    def fork_beam(self, search: BeamSearch[Sequence], parent: Sequence) -> Sequence:
        """A new beam that has got exactly as far as its parent. The next plan tells the decoder."""
        child = parent.fork(parent.choice)
        self._enter(child)
        self.slots.give(child, search.spare_slots.pop())
        self.tables.share(child, parent)
        child.num_sealed = parent.num_sealed
        self.swapping.share(child, parent)
        self._beam_forks.append((child, parent))
        if parent.status is SequenceStatus.RUNNING:
            self._run(child)
        else:
            self.media.restarted(child)
            self._wait(child)
        return child

    def append_to_beam(self, beam: Sequence, token: int) -> None:
        """Commits the token that a search chose. The next plan tells the decoder."""
        beam.tokens.append(token)
        beam.num_tokens = len(beam.tokens)
        self._beam_tokens.append((beam, token))
        self.update_cache(beam)

    def end_search(self, search: BeamSearch[Sequence]) -> None:
        """Ends all beams of a search and frees its slots."""
        search.done = True
        for beam in search.live:
            if not beam.ended:
                self.end(beam)
        self.slots.end_search(search)
