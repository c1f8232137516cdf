"""Connections between processes: in order within one, independent of each other, slow, held back or cut."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tests.simulation.virtual_loop import Process, VirtualLoop, current_process

_HALF_OPEN_S = 5.0  # a peer that does not answer for so long is given up, where a protocol asks for signs of life


class Refused(ConnectionError):
    """Nothing listens at the address, or it cannot be reached."""


class End:
    """One side of a connection. `on_message` and `on_close` are called in the process that holds it."""

    def __init__(self, network: "Network", process: Process) -> None:
        self.process = process
        self.peer: End
        self.on_message: Callable[[Any], None] = lambda message: None
        self.on_close: Callable[[], None] = lambda: None
        self.closed = False
        self.pings = False  # whether the protocol notices a silent peer by itself
        self._network = network
        self._last = 0.0  # when the last message arrives at the peer

    def send(self, message: Any) -> None:
        """Sends a message, unless the connection is closed."""
        if not self.closed:
            self._network.carry(self, message)

    def close(self) -> None:
        """Closes the connection; the peer learns of it after all that was sent before."""
        if not self.closed:
            self._network.carry(self, None)
            self.drop()

    def drop(self) -> None:
        """Drops this end without telling the peer."""
        self.closed = True
        self._network.connections.pop(self, None)

    def hear(self, message: Any) -> None:
        """Called when a message arrives; None when the peer has closed."""
        if self.closed:
            return
        if message is None:
            self.drop()
            self.on_close()
        else:
            self.on_message(message)


class Network:
    """Listeners by address, messages under way, and the faults of connections."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self.connections: dict[End, None] = {}
        self._holding: dict[End, list[Any]] = {}  # what waits until a partition is healed
        self.slow: dict[frozenset[str], float] = {}  # two processes: seconds more
        self.parted: set[frozenset[str]] = set()
        self.over = False
        self._rng = rng

    def listen(self, address: str, accept: Callable[[End], None]) -> None:
        """The running process takes connections at an address until it dies or `unlisten`s."""
        process = current_process()
        assert process is not None
        if address in self.listeners:
            raise OSError(f"{address} is taken")
        self.listeners[address] = (process, accept)
        process.on_death.append(lambda: self.unlisten(address, process))

    def unlisten(self, address: str, process: Process) -> None:
        """Takes no more connections there."""
        if self.listeners.get(address, (None,))[0] is process:
            del self.listeners[address]

    async def connect(self, address: str) -> End:
        """Connects the running process. Raises Refused."""
        process = current_process()
        assert process is not None
        done = self.loop.create_future()
        self.loop.call_later(self._delay(process.name, address), _wake, done)
        await done
        found = self.listeners.get(address)
        if found is not None and self._cannot(process, found[0]):
            done = self.loop.create_future()
            self.loop.call_later(3.0, _wake, done)
            await done
            found = None
        if found is None or self.over:
            raise Refused(f"{address} refuses connections")
        other, accept = found
        near, far = End(self, process), End(self, other)
        near.peer, far.peer = far, near
        for end in (near, far):
            self.connections[end] = None
        self.loop.call_in(other, accept, far)
        return near

    async def refuses(self, address: str) -> bool:
        """Whether nothing listens at an address and its machine can be reached to say so."""
        process = current_process()
        assert process is not None
        await asyncio.sleep(self._delay(process.name, address))
        if address in self.listeners:
            return False
        return frozenset((process.name, address.rsplit(":", 1)[0])) not in self.parted

    def carry(self, end: End, message: Any) -> None:
        """Brings a message to the peer, after those sent before it."""
        if self.over:
            return
        if self._cannot(end.process, end.peer.process):
            self._holding.setdefault(end, []).append(message)
            return
        arrives = self.loop.now + self._delay(end.process.name, end.peer.process.name)
        end._last = max(end._last, arrives)
        self.loop.call_at(end._last, end.peer.hear, message, context=end.peer.process.context)

    def partition(self, one: str, other: str) -> None:
        """Partitions two processes: what they send each other waits."""
        pair = frozenset((one, other))
        self.parted.add(pair)
        self.loop.call_later(_HALF_OPEN_S, self.give_up_silent)

    def heal(self, one: str, other: str) -> None:
        """Ends a partition: what waited is sent."""
        self.parted.discard(frozenset((one, other)))
        holding, self._holding = self._holding, {}
        for end, held in holding.items():
            for message in held:
                self.carry(end, message)

    def give_up_silent(self) -> None:
        """Protocols with pings end connections to peers that have been away for long."""
        for end in list(self.connections):
            other = end.peer.process
            if end.pings and (other.frozen or self._cannot(end.process, other)):
                self.break_end(end)
                self._holding.pop(end.peer, None)
                if not end.peer.closed:
                    self.loop.call_in(other, end.peer.hear, None)

    def break_end(self, end: End) -> None:
        """One side learns that the connection is gone."""
        self.loop.call_in(end.process, end.hear, None)

    def cut(self, end: End) -> None:
        """Both sides learn it; what was under way is lost."""
        for one in (end, end.peer):
            self._holding.pop(one, None)
            self.break_end(one)

    def close_all(self, process: Process) -> None:
        """What the kernel does for a process that died."""
        for end in list(self.connections):
            if end.process is process:
                end.close()

    def _cannot(self, one: Process, other: Process) -> bool:
        return bool(self.parted) and frozenset((one.name, other.name)) in self.parted

    def _delay(self, one: str, other: str) -> float:
        delay = 0.0001 + 0.0009 * self._rng.random() ** 4
        if self.slow:
            delay += self.slow.get(frozenset((one, other)), 0.0) * self._rng.random()
        return delay


def _wake(future: Any) -> None:
    if not future.done():
        future.set_result(None)
