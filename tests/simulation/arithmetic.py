"""A language model made of arithmetic, and a decoder's compute side that runs it in virtual time.

What a real cache holds of a position depends on all tokens up to it; here it is one number that does. A row continues
from the number that its blocks really hold: whoever reads a block that was never written, or was overwritten, gets
another text, and the client sees it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.decoder.plan import Limits, Plan
from services.decoder.sealed_blocks import SealedBlocks
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepResult, StepTimes

_MASK = (1 << 64) - 1
_ROOT = 0x9E3779B97F4A7C15
_NEVER = 0xBAD


def mix(before: int, token: int) -> int:
    """What the cache holds of a position, from that of the one before and the position's token."""
    value = (before ^ (token + 0x632BE59BD9B4E019)) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ value >> 32


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

    def generate(self, prompt: list[int], choice: int, count: int, stops: bool) -> list[int]:
        """What an undisturbed run gives: `count` tokens, fewer where the stop token ends it."""
        state = _ROOT
        for token in prompt:
            state = mix(state, token)
        output: list[int] = []
        while len(output) < count:
            output.append(self.next_token(state, choice))
            state = mix(state, output[-1])
            if stops and output[-1] == self.stop_token:
                break
        return output


MODEL = Model()


@dataclass
class _Slot:
    tokens: list[int]
    choice: int
    computed: int = 0
    table: list[int] = field(default_factory=list)


class _Slots(dict[int, _Slot]):
    @property
    def empty(self) -> bool:
        """Whether no sequence is known."""
        return not self


class NoEmbeddings:
    """A decoder of text alone."""

    def listen(self, on_news: Callable[[], None]) -> None:
        """There is none."""

    def start(self, ref: Any) -> None:
        raise AssertionError("a text model was sent embeddings")

    def report(self) -> tuple[list[bytes], list[bytes]]:
        return [], []

    async def close(self) -> None:
        """Nothing is open."""


Deliver = Callable[[StepResult], None]


class ArithmeticRunner:
    """Stands for `services.decoder.runner.Runner`. `broken` hears of what no plan may do; `named` of each block name
    with what the block holds.
    """

    def __init__(
        self,
        limits: Limits,
        executor: "VirtualExecutor",
        seconds: Callable[[int], float],
        broken: Callable[[str], None],
        named: Callable[[bytes, int], None],
    ) -> None:
        self.limits = limits
        self.embeddings = NoEmbeddings()
        self.sealed = SealedBlocks(limits.num_blocks)
        self.slots = _Slots()
        self._executor = executor
        self._seconds = seconds
        self._broken = broken
        self._named = named
        self._content = [[_NEVER] * limits.block_size for _ in range(limits.num_blocks)]
        self._host = [[_NEVER] * limits.block_size for _ in range(limits.num_host_blocks)]

    def reset(self) -> None:
        """Forgets all sequences; sealed blocks stay."""
        self.slots.clear()

    def step(self, plan: Plan, deliver: Deliver, queue_us: int = 0) -> None:
        """Applies a plan now; the result leaves when the step's time is over."""
        self._apply(plan)
        tokens = self._run(plan)
        result = StepResult(lease=plan.lease, step=plan.step)
        result.tokens = np.asarray(tokens, "<i4").tobytes()
        count = int(plan.row_count.sum())
        seconds = self._seconds(count) if count else 0.0002
        result.times.CopyFrom(StepTimes(queue_us=queue_us, forward_us=int(seconds * 1e6)))
        self._executor.busy(seconds, lambda: deliver(result))

    def _apply(self, plan: Plan) -> None:
        size = self.limits.block_size
        for i, block in enumerate(plan.sealed_blocks.tolist()):
            self._named(plan.sealed_hashes[16 * i : 16 * i + 16], self._content[block][size - 1])
        self.sealed.seal(plan.sealed_blocks, plan.sealed_hashes)
        for slot in plan.drop.tolist():
            if self.slots.pop(slot, None) is None:
                self._broken(f"slot {slot} is dropped and holds nothing")
        for new in plan.new:
            self._introduce(new)
        forks = zip(plan.fork_child.tolist(), plan.fork_parent.tolist(), plan.fork_choice.tolist())
        for child, parent, choice in forks:
            self._check(child not in self.slots, f"slot {child} is forked into and taken")
            of = self.slots[parent]
            self.slots[child] = _Slot(list(of.tokens), choice, of.computed, list(of.table))
        self._edit_tables(plan)
        self._move(plan)

    def _introduce(self, new: NewSequence) -> None:
        self._check(new.slot not in self.slots, f"slot {new.slot} is given out twice")
        tokens = np.frombuffer(new.tokens, "<i4").tolist()
        self.slots[new.slot] = _Slot(tokens, new.choice, -1)

    def _edit_tables(self, plan: Plan) -> None:
        at, blocks = 0, plan.edit_blocks.tolist()
        edits = zip(plan.edit_slot.tolist(), plan.edit_index.tolist(), plan.edit_len.tolist())
        for slot, index, count in edits:
            table = self.slots[slot].table
            self._check(index <= len(table), f"a hole in the table of slot {slot}")
            table[index:] = blocks[at : at + count]
            at += count
            if index == 0:
                self.slots[slot].computed = -1  # begins anew, or moves in: wherever the row says

    def _move(self, plan: Plan) -> None:
        content, host = self._content, self._host
        moves = zip(plan.swap_out_device.tolist(), plan.swap_out_host.tolist())
        for device, place in moves:
            host[place] = list(content[device])
        for source, target in zip(plan.copy_src.tolist(), plan.copy_dst.tolist()):
            content[target] = list(content[source])
        for place, device in zip(plan.swap_in_host.tolist(), plan.swap_in_device.tolist()):
            content[device] = list(host[place])
        self.sealed.overwrite(plan.copy_dst)
        self.sealed.overwrite(plan.swap_in_device)

    def _run(self, plan: Plan) -> list[int]:
        rows = list(zip(plan.row_slot.tolist(), plan.row_start.tolist(), plan.row_count.tolist()))
        written: set[tuple[int, int]] = set()
        overwritten: dict[int, None] = {}
        ends: list[int] = [0] * len(rows)
        # Who shares a block that another row of this step fills reads behind it.
        for row in sorted(range(len(rows)), key=lambda row: rows[row][1]):
            slot, start, count = rows[row]
            ends[row] = self._row(slot, start, count, written, overwritten)
        self.sealed.overwrite(np.fromiter(overwritten, np.int64, len(overwritten)))
        tokens = []
        for row, slot in zip(plan.sample_row.tolist(), plan.sample_slot.tolist()):
            of = self.slots[slot]
            end = rows[row][1] + rows[row][2]
            self._check(len(of.tokens) == end, f"slot {slot}: a sample at {end} of {of.tokens}")
            tokens.append(MODEL.next_token(ends[row], of.choice))
            of.tokens.append(tokens[-1])
            of.computed = end
        return tokens

    def _row(
        self,
        slot: int,
        start: int,
        count: int,
        written: set[tuple[int, int]],
        overwritten: dict[int, None],
    ) -> int:
        size, of = self.limits.block_size, self.slots[slot]
        self._check(of.computed in (-1, start), f"slot {slot}: {start} planned, {of.computed} here")
        self._check(start + count <= len(of.tokens), f"slot {slot}: a row beyond its tokens")
        before = start - 1
        state = self._content[of.table[before // size]][before % size] if start else _ROOT
        for position in range(start, start + count):
            state = mix(state, of.tokens[position])
            block, place = of.table[position // size], position % size
            self._check((block, place) not in written, f"two rows write to block {block}")
            written.add((block, place))
            overwritten[block] = None
            self._content[block][place] = state
        of.computed = start + count
        return state

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
        """Nothing to end."""

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
