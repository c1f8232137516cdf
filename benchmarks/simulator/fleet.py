"""Several shards fed from one queue, in windows of virtual time.

Shards meet only at the ends of windows: there each says how many requests it could start, and what arrives in the next
window is distributed by that, as if each took it from the queue. Within a window every event happens at its exact time.
"""

import gc
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from benchmarks.simulator.shard import Shard, ShardOptions, ShardOutcome
from benchmarks.simulator.trace import Arrival

WINDOW_S = 0.1


class State(NamedTuple):
    """Of a shard at the end of a window."""

    num_startable: int
    live: int
    is_idle: bool


class Worker(Protocol):
    """A shard, here or in a process of its own."""

    def start(self, arrivals: list[Arrival], begin: float, until: float) -> None: ...
    def wait(self) -> "State": ...
    def finish(self) -> ShardOutcome: ...


def simulate(trace: Iterable[Arrival], options: ShardOptions, processes: int) -> list[ShardOutcome]:
    """Runs a trace to its end. `options.decoders` are in all; they are divided among the processes."""
    shares = [
        _with_decoders(options, options.decoders // processes + (n < options.decoders % processes))
        for n in range(processes)
    ]
    workers: list[Worker] = [_Local(shares[0])] if processes == 1 else [*map(_Remote, shares)]
    source = _Source(trace)
    queue: deque[Arrival] = deque()
    startable = [16 * share.decoders for share in shares]
    live, begin = 0, 0.0
    while source.has_more or queue or live:
        until = begin + WINDOW_S
        queue += source.take(until)
        dealt = _deal(queue, startable)
        for worker, arrivals in zip(workers, dealt, strict=True):
            worker.start(arrivals, begin, until)
        source.prepare(until + WINDOW_S)
        states = [worker.wait() for worker in workers]
        startable = [state.num_startable for state in states]
        live = sum(state.live for state in states)
        begin = until
        if all(state.is_idle for state in states) and not (source.has_more or any(dealt)):
            break  # whoever is still live is stuck: the outcome says so
    return [worker.finish() for worker in workers]


class _Source:
    """A trace, read while the shards are at work."""

    def __init__(self, trace: Iterable[Arrival]) -> None:
        self._trace = iter(trace)
        self._ahead: deque[Arrival] = deque()
        self._last = next(self._trace, None)

    @property
    def has_more(self) -> bool:
        """Whether anything is left of it."""
        return bool(self._ahead) or self._last is not None

    def prepare(self, until: float) -> None:
        """Reads what arrives until then."""
        while self._last is not None and self._last.at <= until:
            self._ahead.append(self._last)
            self._last = next(self._trace, None)

    def take(self, until: float) -> deque[Arrival]:
        """What arrives until then and was not taken before. Times never go back from call to call."""
        self.prepare(until)
        taken, self._ahead = self._ahead, deque()
        return taken


def _deal(queue: deque[Arrival], startable: list[int]) -> list[list[Arrival]]:
    """Gives each request to the shard that can start most; the rest stays queued."""
    left = list(startable)
    dealt: list[list[Arrival]] = [[] for _ in startable]
    while queue:
        most = max(range(len(left)), key=left.__getitem__)
        if left[most] <= 0:
            break
        left[most] -= 1
        dealt[most].append(queue.popleft())
    return dealt


class _Local:
    def __init__(self, options: ShardOptions) -> None:
        self._shard = Shard(options)

    def start(self, arrivals: list[Arrival], begin: float, until: float) -> None:
        with _no_collection():
            self._shard.run(arrivals, begin, until)

    def wait(self) -> State:
        return _state(self._shard)

    def finish(self) -> ShardOutcome:
        return self._shard.finish()


class _Remote:
    def __init__(self, options: ShardOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, arrivals: list[Arrival], begin: float, until: float) -> None:
        self._pipe.send((arrivals, begin, until))

    def wait(self) -> State:
        state: State = self._pipe.recv()
        return state

    def finish(self) -> ShardOutcome:
        self._pipe.send(None)
        outcome: ShardOutcome = self._pipe.recv()
        self._process.join()
        return outcome


def _serve(pipe: Connection, options: ShardOptions) -> None:
    with _no_collection():
        shard = Shard(options)
        while (window := pipe.recv()) is not None:
            shard.run(*window)
            pipe.send(_state(shard))
        pipe.send(shard.finish())


def _state(shard: Shard) -> State:
    return State(shard.num_startable, shard.num_live, shard.is_idle)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing in a shard is cyclic, and there are millions of objects to look through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_decoders(options: ShardOptions, count: int) -> ShardOptions:
    return ShardOptions(**{**vars(options), "decoders": count})


def counted(trace: Iterable[Arrival], every: int) -> Iterator[Arrival]:
    """Says on the way how far it is, each `every` requests."""
    for arrival in trace:
        if arrival.number and arrival.number % every == 0:
            print(
                f"  {arrival.number:,} requests sent, {arrival.at:.1f} s of virtual time",
                flush=True,
            )
        yield arrival
