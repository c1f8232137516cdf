"""A language model made of arithmetic, and a decoder's compute side that runs it in virtual time.

What a real cache holds of a position depends on all tokens up to it; here it is one number that does. A row continues
from the number that its blocks really hold: whoever reads a block that was never written, or was overwritten, gets
another text, and the client sees it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.decoder.plan import Ints, Limits, Plan
from services.decoder.sealed_blocks import SealedBlocks
from services.decoder.slots import ANY_START, SlotTable
from shared.block_hash import block_names, root_name
from tessera.decoder.v1.decoder_pb2 import StepResult, StepTimes

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
BLOCK_SIZE = 4
_NO_PARENT = root_name(BLOCK_SIZE, "", b"")


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


def _columns(*arrays: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in arrays), strict=True)


class ArithmeticRunner:
    """Stands for `services.decoder.runner.Runner`, on the real table of slots and the real names of blocks.

    `broken` hears of what no plan may do.
    """

    def __init__(
        self,
        limits: Limits,
        executor: "VirtualExecutor",
        seconds: Callable[[int], float],
        broken: Callable[[str], None],
    ) -> None:
        self.limits = limits
        self.embeddings = NoEmbeddings()
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

    def reset(self) -> None:
        """Forgets all sequences; sealed blocks stay, and what their scheduler had no time to name is named."""
        self.sealed.complete(self.slots)
        self._check_names()
        self.slots.drop(np.flatnonzero(self.slots.known))
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
        slots = self.slots
        if len(plan.sealed_blocks):
            self.sealed.seal(plan.sealed_blocks, plan.sealed_hashes)
            self._check_names()
        for slot in plan.drop.tolist():
            self._check(bool(slots.known[slot]), f"slot {slot} is dropped and holds nothing")
        slots.drop(plan.drop)
        for new in plan.new:
            slots.introduce(new)
        forks = _columns(plan.fork_child, plan.fork_parent, plan.fork_choice)
        for child, parent, choice in forks:
            slots.fork(child, parent, choice)
        slots.set_last_tokens(plan.set_token_slot, plan.set_token)
        slots.edit_tables(plan)
        self._move(plan)

    def _move(self, plan: Plan) -> None:
        content, host = self._content, self._host
        for device, place in _columns(plan.swap_out_device, plan.swap_out_host):
            host[place] = list(content[device])
        for source, target in _columns(plan.copy_src, plan.copy_dst):
            content[target] = list(content[source])
        for place, device in _columns(plan.swap_in_host, plan.swap_in_device):
            content[device] = list(host[place])
        self.sealed.overwrite(plan.copy_dst)
        self.sealed.overwrite(plan.swap_in_device)

    def _run(self, plan: Plan) -> list[int]:
        slots = self.slots
        rows = list(_columns(plan.row_slot, plan.row_start, plan.row_count))
        written: dict[tuple[int, int], None] = {}
        ends: list[int] = [0] * len(rows)
        # Who shares a block that another row of this step fills reads behind it.
        for row in sorted(range(len(rows)), key=lambda row: rows[row][1]):
            ends[row] = self._row(*rows[row], written)
        for slot, start, count in rows:
            slots.computed[slot] = start + count
        blocks = dict.fromkeys(block for block, _ in written)
        self.sealed.overwrite(np.fromiter(blocks, np.int64, len(blocks)))
        tokens: list[int] = []
        for row, slot in _columns(plan.sample_row, plan.sample_slot):
            end, length = rows[row][1] + rows[row][2], int(slots.length[slot])
            self._check(length == end, f"slot {slot}: a sample at {end} of {length} tokens")
            tokens.append(MODEL.next_token(ends[row], int(slots.choice[slot])))
        if tokens:
            owners = plan.sample_slot.astype(np.int64)
            computed = plan.row_start[plan.sample_row] + plan.row_count[plan.sample_row]
            slots.append(owners, np.asarray(tokens, np.int32), computed)
        return tokens

    def _row(self, slot: int, start: int, count: int, written: dict[tuple[int, int], None]) -> int:
        size, slots, end = self.limits.block_size, self.slots, start + count
        here = int(slots.computed[slot])
        self._check(bool(slots.known[slot]), f"a row of slot {slot}, which holds nothing")
        self._check(here in (ANY_START, start), f"slot {slot}: {start} planned, {here} computed")
        self._check(end <= slots.length[slot], f"slot {slot}: a row beyond its tokens")
        self._check(end <= slots.table_len[slot] * size, f"slot {slot}: a row beyond its blocks")
        table, tokens = slots.table[slot].tolist(), slots.tokens[slot].tolist()
        before = start - 1
        state = self._content[table[before // size]][before % size] if start else _ROOT
        for position in range(start, end):
            previous, state = state, mix(state, tokens[position])
            self._steps[state] = previous, tokens[position]
            place = table[position // size], position % size
            self._check(place not in written, f"two rows write to block {place[0]}")
            written[place] = None
            self._content[place[0]][place[1]] = state
        return state

    def _check_names(self) -> None:
        """The name of each block must be that of the tokens whose states it holds."""
        data, hashes = self.sealed.list()
        for i, block in enumerate(np.frombuffer(data, "<i4").tolist()):
            name, state = hashes[16 * i : 16 * i + 16], self._content[block][-1]
            tokens: list[int] = []
            while state != _ROOT and state in self._steps:
                state, token = self._steps[state]
                tokens.append(token)
            ids = np.asarray(tokens[::-1], "<i4").tobytes()
            if not ids or block_names(_NO_PARENT, ids, self.limits.block_size)[-1] != name:
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
