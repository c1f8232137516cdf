"""A language model made of arithmetic, and a decoder's compute side that runs it in virtual time.

What a real cache holds of a position depends on all tokens up to it; here it is one number that does. A row continues
from the number that its blocks really hold: a row that reads a block which was never written, was overwritten, or
belongs to another salt gives a different text, which the client notices. Where the model has state, a row continues
from that of its slot. A plan that divides what the model needs whole is reported as broken.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from services.decoder.loading.profile_run import Profile
from services.decoder.models.needs import AttentionKind, Needs
from services.decoder.worker.embeddings import Embeddings
from services.decoder.worker.plan import Ints, Limits, Plan
from services.decoder.worker.sealed_blocks import SealedBlocks
from services.decoder.worker.slots import ANY_START, SlotTable
from shared.artifacts.store import ArtifactReader
from shared.block_hash import block_names, prefix_digest, root_name
from shared.errors import Precondition, ServingError
from shared.served_part import ServedPart
from tessera.decoder.v1.decoder_pb2 import FailedRow, StepResult, StepTimes

_MASK = (1 << 64) - 1
_NEVER = 0xBAD


def mix(before: int, token: int) -> int:
    """What the cache holds of a position, from that of the one before and the position's token."""
    value = (before ^ (token + 0x632BE59BD9B4E019)) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ value >> 32


def first_state(root: bytes, prefix: Sequence[int] = ()) -> int:
    """The state before the first token of a sequence whose first block has this parent. `prefix`: what all of its
    tokens depend on.
    """
    state = int.from_bytes(root[:8], "little")
    for value in prefix:
        state = mix(state, value)
    return state


def has_prefix(needs: Needs) -> bool:
    """Whether all tokens of a sequence depend on its whole prompt."""
    return needs.attention is AttentionKind.PREFIX_LM


def root_of(needs: Needs, salt: bytes, prompt: list[int], media: dict[int, bytes]) -> bytes:
    """The parent of a sequence's first block, of its prompt and the digests of pictures by their places in it; empty
    where nobody else may find its blocks."""
    if needs.state or needs.whole_prompt:
        return b""
    prefix = b""
    if has_prefix(needs):
        pictures = [digest + struct.pack("<i", place) for place, digest in media.items()]
        prefix = prefix_digest(np.asarray(prompt, "<i4").tobytes(), b"".join(pictures))
    return root_name(BLOCK_SIZE, "", salt, prefix)


@dataclass(frozen=True)
class Model:
    """Chooses tokens below `vocabulary`; about one in `stop_every` is `stop_token`."""

    vocabulary: int = 200
    stop_token: int = 0
    stop_every: int = 60

    def next_token(self, state: int, choice: int) -> int:
        """The token that follows."""
        value = mix(state, 7_000_003 * (choice + 1))
        if value % self.stop_every == 0:
            return self.stop_token
        return 1 + (value >> 8) % (self.vocabulary - 1)

    def generate(
        self, prompt: list[int], choice: int, count: int, stops: bool, first: int
    ) -> list[int]:
        """What an undisturbed run gives from the state `first` on: `count` tokens, fewer where one ends it."""
        state = first_state(first.to_bytes(8, "little"), prompt)
        output: list[int] = []
        while len(output) < count:
            output.append(self.next_token(state, choice))
            state = mix(state, output[-1])
            if stops and output[-1] == self.stop_token:
                break
        return output


MODEL = Model()
# Of the models in the worlds, as often as they stand here.
ALL_NEEDS = (
    *[Needs()] * 5,
    *[Needs(attention) for attention in AttentionKind],
    Needs(whole_prompt=True),
    Needs(state=True),
    Needs(whole_prompt=True, state=True),
)
BLOCK_SIZE = 4
HIDDEN = 2  # width of an embedding row; the first number says whose it is
_PICTURES = 1 << 20


def picture_value(digest: bytes, row: int) -> int:
    """The value that takes the place of a token id where an embedding row of a picture is used."""
    return _PICTURES + 1000 * digest[0] + row


Deliver = Callable[[StepResult], None]


def _columns(*arrays: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in arrays), strict=True)


class ArithmeticWorker:
    """Stands for `services.decoder.worker.worker.Worker`, on the real table of slots and the real names of blocks.

    `broken` is called with a description of what a plan did wrong.
    """

    def __init__(
        self,
        limits: Limits,
        executor: "VirtualExecutor",
        seconds: Callable[[int], float],
        broken: Callable[[str], None],
        needs: Needs | None = None,
    ) -> None:
        self.limits = limits
        self.needs = needs or Needs()
        self.embeddings = Embeddings(ArtifactReader(), lambda tensor: tensor.float(), 64)
        self.sealed = SealedBlocks(limits.num_blocks)
        self.slots = SlotTable(
            limits.max_slots, limits.max_model_len, limits.block_size, MODEL.vocabulary
        )
        self._executor = executor
        self._seconds = seconds
        self._broken = broken
        self._content = [[_NEVER] * limits.block_size for _ in range(limits.num_blocks)]
        self._host = [[_NEVER] * limits.block_size for _ in range(limits.num_host_blocks)]
        # State -> the state before it and the token between them: whatever a block holds can be spelled out.
        self._steps: dict[int, tuple[int, int]] = {}
        self._roots: dict[int, bytes] = {}  # first state -> the parent that it comes from
        # Of models with state outside the blocks: slot -> (tokens that the state covers, the state).
        self._states: dict[int, tuple[int, int]] = {}
        self._has_failed = False  # some row, since the last reset

    def reset(self) -> None:
        """Forgets all sequences; sealed blocks stay, and what their scheduler had no time to name is named."""
        if not self._has_failed:
            self.sealed.complete(self.slots)
            self._check_names()
        self._has_failed = False
        self._drop(np.flatnonzero(self.slots.known))
        self.slots.clear()
        self.embeddings.forget_sequences()

    def step(self, plan: Plan, deliver: Deliver, queue_us: int = 0) -> None:
        """Applies a plan now; the result leaves when the step's time is over."""
        self._apply(plan)
        result = StepResult(lease=plan.lease, step=plan.step)
        tokens = self._run(plan, result)
        ready, lost = self.embeddings.report()
        result.artifacts_ready.extend(ready)
        result.artifacts_lost.extend(lost)
        result.tokens = np.asarray(tokens, "<i4").tobytes()
        count = int(plan.row_count.sum())
        seconds = self._seconds(count) if count else 0.0002
        result.times.CopyFrom(StepTimes(queue_us=queue_us, forward_us=int(seconds * 1e6)))
        self._executor.busy(seconds, lambda: deliver(result))

    def _apply(self, plan: Plan) -> None:
        slots = self.slots
        self.embeddings.hold([bytes(ref.digest) for ref in plan.fetch])
        if len(plan.sealed_blocks):
            self._check(not self._is_alone, "blocks are sealed that nobody may find")
            self.sealed.seal(plan.sealed_blocks, plan.sealed_hashes)
            self._check_names()
        for slot in plan.drop.tolist():
            self._check(bool(slots.known[slot]), f"slot {slot} is dropped and holds nothing")
        self._drop(plan.drop)
        for new in plan.new:
            slots.introduce(new)
            self._check(bool(new.root_name) != self._is_alone, f"the root is {new.root_name!r}")
            self._use(new.slot)
        forks = _columns(plan.fork_child, plan.fork_parent, plan.fork_choice)
        for child, parent, choice in forks:
            slots.fork(child, parent, choice)
            self._states[child] = self._states.get(parent, (0, 0))
            self._use(child)
        slots.set_last_tokens(plan.set_token_slot, plan.set_token)
        slots.edit_tables(plan)
        self._move(plan)
        self.embeddings.release(bytes(digest) for digest in plan.release)

    @property
    def _is_alone(self) -> bool:
        """Whether no sequence begins with the blocks of another."""
        return self.needs.state or self.needs.whole_prompt

    def _use(self, slot: int) -> None:
        self.embeddings.use(span.digest for span in self.slots.media.get(slot, ()))

    def _drop(self, slots: Any) -> None:
        for slot in slots.tolist():
            self.embeddings.unuse(span.digest for span in self.slots.media.get(slot, ()))
        self.slots.drop(slots)

    def _move(self, plan: Plan) -> None:
        content, host = self._content, self._host
        self._check(not (self.needs.state and len(plan.swap_out_device)), "state is swapped out")
        for device, place in _columns(plan.swap_out_device, plan.swap_out_host):
            host[place] = list(content[device])
        for source, target in _columns(plan.copy_src, plan.copy_dst):
            content[target] = list(content[source])
        for place, device in _columns(plan.swap_in_host, plan.swap_in_device):
            content[device] = list(host[place])
        self.sealed.overwrite(plan.copy_dst)
        self.sealed.overwrite(plan.swap_in_device)

    def _run(self, plan: Plan, result: StepResult) -> list[int]:
        slots = self.slots
        rows = list(_columns(plan.row_slot, plan.row_start, plan.row_count))
        written: dict[tuple[int, int], None] = {}
        ends: list[int | None] = [None] * len(rows)
        # In order of position: a row may read a block that an earlier row of the same step fills.
        for row in sorted(range(len(rows)), key=lambda row: rows[row][1]):
            slot, start, count = rows[row]
            ends[row] = self._row(row, slot, start, count, written, result)
        blocks = dict.fromkeys(block for block, _ in written)
        self.sealed.overwrite(np.fromiter(blocks, np.int64, len(blocks)))
        for (slot, start, count), end in zip(rows, ends, strict=True):
            if end is not None:
                slots.computed[slot] = start + count
        for child, parent in _columns(plan.fork_child, plan.fork_parent):
            if child in plan.sample_slot and child not in plan.row_slot:
                self._states[child] = self._states[parent]
        tokens: list[int] = []
        for row, slot in _columns(plan.sample_row, plan.sample_slot):
            state, end = ends[row], rows[row][1] + rows[row][2]
            if state is None or slots.failed[slot]:
                tokens.append(-1)
                continue
            length = int(slots.length[slot])
            self._check(length == end, f"slot {slot}: a sample at {end} of {length} tokens")
            tokens.append(MODEL.next_token(state, int(slots.choice[slot])))
            owner = np.asarray([slot])
            place = np.asarray([end], np.int32)
            slots.extend(owner, place)
            slots.fill_in(owner, place, np.asarray(tokens[-1:], np.int32))
        return tokens

    def _row(
        self,
        row: int,
        slot: int,
        start: int,
        count: int,
        written: dict[tuple[int, int], None],
        result: StepResult,
    ) -> int | None:
        """The state at the row's end; None where it fails, or its slot has failed before."""
        if self.slots.failed[slot]:
            return None
        why = self._mismatch(slot, start, start + count)
        if why is not None:
            self._check(self._has_failed, why)
            self._fail(row, slot, Precondition("ROW_MISMATCH", why), result)
            return None
        try:
            values = self._values(slot, start, start + count)
            self._check_whole(slot, start, start + count)
            state = self._state_before(slot, start)
        except ServingError as error:
            self._fail(row, slot, error, result)
            return None
        size, table = self.limits.block_size, self.slots.table[slot].tolist()
        for position, value in enumerate(values, start):
            previous, state = state, mix(state, value)
            self._steps[state] = previous, value
            place = table[position // size], position % size
            self._check(place not in written, f"two rows write to block {place[0]}")
            written[place] = None
            self._content[place[0]][place[1]] = state
        self._states[slot] = start + count, state
        return state

    def _state_before(self, slot: int, start: int) -> int:
        """The state from which a row continues. Raises what the embeddings of a prefix raise."""
        size, before = self.limits.block_size, start - 1
        if not start:
            length = int(self.slots.prompt_len[slot]) if has_prefix(self.needs) else 0
            state = first_state(self.slots.root_name[slot], self._values(slot, 0, length))
            self._roots[state] = self.slots.root_name[slot]
            return state
        if self.needs.state:
            position, state = self._states[slot]
            self._check(position == start, f"slot {slot}: {start} planned, state at {position}")
            return state
        block = int(self.slots.table[slot, before // size])
        return self._content[block][before % size]

    def _check_whole(self, slot: int, start: int, end: int) -> None:
        """Nothing is divided that the model needs whole."""
        slots, attention = self.slots, self.needs.attention
        whole = end == slots.length[slot] or not self.needs.whole_prompt
        if has_prefix(self.needs):
            whole = whole and end >= slots.prompt_len[slot]
        if attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in slots.media.get(slot, ()):
                first = int(span.positions[0])
                whole = whole and not (first < start < span.end or first < end < span.end)
        self._check(whole, f"slot {slot}: a row from {start} to {end} of what must be whole")

    def _fail(self, row: int, slot: int, error: ServingError, result: StepResult) -> None:
        self.slots.failed[slot] = True
        self._has_failed = True
        result.failed.append(FailedRow(row=row, failure=error.to_failure()))

    def _mismatch(self, slot: int, start: int, end: int) -> str | None:
        slots, here = self.slots, int(self.slots.computed[slot])
        if not slots.known[slot]:
            return f"a row of slot {slot}, which holds nothing"
        if here not in (ANY_START, start):
            return f"slot {slot}: {start} planned, {here} computed"
        if end > slots.length[slot] or end > slots.table_len[slot] * self.limits.block_size:
            return f"slot {slot}: a row to {end}, beyond its tokens or blocks"
        return None

    def _values(self, slot: int, start: int, end: int) -> list[int]:
        """Tokens, and numbers of embedding rows in their places. Raises what the embeddings raise."""
        values: list[int] = self.slots.tokens[slot, start:end].tolist()
        for span in self.slots.media.get(slot, ()):
            places = span.positions.tolist()
            inside = [row for row, place in enumerate(places) if start <= place < end]
            if inside:
                first, last = inside[0], inside[-1] + 1
                rows = self.embeddings.rows(span.digest, first, last, len(places), HIDDEN)
                for row, found in zip(inside, rows[:, 0].tolist(), strict=True):
                    values[places[row] - start] = int(found)
        return values

    def _check_names(self) -> None:
        """The name of each block must be that of the tokens whose states it holds."""
        data, hashes = self.sealed.list()
        for i, block in enumerate(np.frombuffer(data, "<i4").tolist()):
            name, state = hashes[16 * i : 16 * i + 16], self._content[block][-1]
            tokens: list[int] = []
            while state not in self._roots and state in self._steps:
                state, token = self._steps[state]
                tokens.append(token)
            if tokens and max(tokens) >= _PICTURES:
                continue  # the names of pictures take part
            ids = np.asarray(tokens[::-1], "<i4").tobytes()
            root = self._roots.get(state, b"")
            if not ids or block_names(root, ids, self.limits.block_size)[-1] != name:
                self._broken(f"block {block} has a name that is not that of its tokens")

    def _check(self, right: bool, what: str) -> None:
        if not right:
            self._broken(what)


class VirtualExecutor:
    """The compute thread: jobs one after the other, each as long as it says by `busy`."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False
        self._rest: tuple[float, Callable[[], None]] | None = None

    def busy(self, seconds: float, then: Callable[[], None]) -> None:
        """Called by a job: it takes so long, and ends with `then`."""
        self._rest = (seconds, then)

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job after those before it."""
        self._jobs.append(job)
        if not self._running:
            self._running = True
            self._loop.call_soon(self._next)

    async def run(self, job: Callable[[], Any]) -> Any:
        """The same, and waits for it."""
        done = self._loop.create_future()

        def work() -> None:
            try:
                value = job()
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(value)

        self.submit(work)
        return await done

    def stop(self) -> None:
        """Does nothing: there is no thread."""

    def _next(self) -> None:
        if not self._jobs:
            self._running = False
            return
        self._rest = None
        self._jobs.popleft()()
        if self._rest is None:
            self._loop.call_soon(self._next)
        else:
            seconds, then = self._rest
            self._loop.call_later(seconds, self._finish, then)

    def _finish(self, then: Callable[[], None]) -> None:
        then()
        self._next()


def loaded(worker: ArithmeticWorker, step_us: float, token_us: float) -> Any:
    """What `services.decoder.loading.load.load` returns, without the parts that need a real model."""
    return SimpleNamespace(
        worker=worker,
        fingerprint=b"arithmetic-model",
        row_invariant=True,
        profile=Profile(step_bytes=0, step_us=step_us, token_us=token_us),
        needs=worker.needs,
        part=ServedPart("arithmetic", tuple(worker.needs.off)),
    )
