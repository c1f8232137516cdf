"""Redis on the simulated network: a server that speaks its protocol, and the client object that production code is
given. From `RedisConnection` on, all code above is the real one.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from tests.simulation.processes.network import End, Network, Refused
from tests.simulation.redis.model import RedisError, RedisModel, Reply, Status
from tests.simulation.redis.scripts import digest_of, replaced, run_script, script_names
from tests.simulation.virtual_loop import Process, VirtualLoop

ADDRESS = "redis"
_EPOCH_US = 1_800_000_000_000_000


class RedisHost:
    """The machine that Redis runs on: its file survives a kill, but for a tail. `after` sees each command."""

    def __init__(self, loop: VirtualLoop, network: Network, rng: random.Random) -> None:
        self.model = RedisModel(self.now_us)
        self.process = Process(ADDRESS)
        self.after: Callable[[str, list[bytes], Reply], None] = lambda name, words, reply: None
        self._loop = loop
        self._network = network
        self._rng = rng
        self._time_us = 0
        self.lost_writes = False  # ever
        self._known: dict[
            bytes, bytes
        ] = {}  # the scripts that this incarnation has seen, by digest
        self._subscribers: dict[bytes, dict[End, None]] = {}
        self.model.published = self._publish
        self.start()

    def now_us(self) -> int:
        """The clock of Redis, microseconds since the epoch. It stands still while a command is executed."""
        return max(self._time_us, _EPOCH_US + int(self._loop.now * 1_000_000))

    def start(self) -> None:
        """Starts a new process, with what the file holds."""
        self.process = Process(ADDRESS)
        self.process.on_death.append(lambda: self._network.close_all(process))
        process = self.process
        self.model.run_id = f"{self._rng.getrandbits(160):040x}"
        self._known.clear()
        self._subscribers.clear()
        self.process.context.run(self._network.listen, ADDRESS, self._accept)

    def kill(self, lost_ms: int) -> int:
        """Kills Redis and undoes the last milliseconds of its file. Returns how many changes that were."""
        self._loop.kill(self.process)
        undone = self.model.roll_back(self.now_us() - lost_ms * 1000) if lost_ms else 0
        self.lost_writes = self.lost_writes or undone > 0
        return undone

    def _accept(self, end: End) -> None:
        reader = hiredis.Reader(notEnoughData=...)

        def hear(data: bytes) -> None:
            reader.feed(data)
            while (words := reader.gets()) is not ...:
                end.send(self._answer(end, words))

        def close() -> None:
            for listening in self._subscribers.values():
                listening.pop(end, None)

        end.on_message, end.on_close = hear, close

    def _answer(self, end: End, words: list[bytes]) -> bytes:
        self._time_us = self.now_us() + 1  # no command is executed in no time
        name = words[0].upper()
        if name == b"SUBSCRIBE":
            self._subscribers.setdefault(words[1], {})[end] = None
            return resp([b"subscribe", words[1], 1])
        try:
            reply = self._run(name, words)
        except RedisError as error:
            return b"-" + str(error).encode() + b"\r\n"
        return resp(reply)

    def _run(self, name: bytes, words: list[bytes]) -> Reply:
        if name not in (b"EVAL", b"EVALSHA"):
            reply = self.model.call(name, *words[1:])
            self.after(name.decode(), words[1:], reply)
            return reply
        text = self._text(name, words[1])
        script = script_names()[digest_of(text)]
        count = int(words[2])
        arguments = words[3 + count :]
        reply = run_script(self.model, replaced.get(script, text), words[3 : 3 + count], arguments)
        self.after(script, arguments, reply)
        return reply

    def _text(self, name: bytes, word: bytes) -> bytes:
        if name == b"EVAL":
            self._known[digest_of(word)] = word
            return word
        if word not in self._known:
            raise RedisError("NOSCRIPT No matching script. Please use EVAL.")
        return self._known[word]

    def _publish(self, channel: bytes, message: bytes) -> None:
        for end in self._subscribers.get(channel, ()):
            end.send(resp([b"message", channel, message]))


def resp(reply: Reply) -> bytes:
    """A reply as it goes over the wire."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, Status):
        return b"+%b\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(resp, reply))
    return b":%d\r\n" % reply


class SimulatedRedis:
    """Replaces a client of the library in production code: it only connects."""

    def __init__(self, network: Network) -> None:
        self.connection_pool = _Pool(network)

    async def aclose(self) -> None:
        """Closes all connections."""
        for connection in list(self.connection_pool.connections):
            await connection.disconnect()


class _Pool:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.connections: dict[_Connection, None] = {}

    async def get_connection(self) -> "_Connection":
        try:
            end = await self._network.connect(ADDRESS)
        except Refused as error:
            raise RedisConnectionError(str(error)) from error
        connection = _Connection(end)
        self.connections[connection] = None
        return connection

    async def release(self, connection: "_Connection") -> None:
        self.connections.pop(connection, None)


class _Connection:
    """A connection of the library, which reads its answers until a line takes the transport over."""

    def __init__(self, end: End) -> None:
        self._writer = self  # the library keeps its transport there
        self.transport = _Transport(end)
        self._reader = _Reader()
        self.transport.set_protocol(self._reader)

    async def send_command(self, *words: Any) -> None:
        self.transport.write(hiredis.pack_command(words))

    async def read_response(self) -> Any:
        answer = await self._reader.answers.get()
        if isinstance(answer, hiredis.ReplyError):
            raise ResponseError(str(answer))
        if answer is ...:
            raise RedisConnectionError("the connection ended")
        return answer

    async def disconnect(self, nowait: bool = False) -> None:
        self.transport.close()


class _Reader(asyncio.Protocol):
    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = hiredis.Reader(notEnoughData=...)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not ...:
            self.answers.put_nowait(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.answers.put_nowait(...)


class _Transport:
    """As much of a transport as a line needs."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._protocol: Any = asyncio.Protocol()
        end.on_message = lambda data: self._protocol.data_received(data)
        end.on_close = lambda: self._protocol.connection_lost(ConnectionResetError("reset by peer"))

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._end.send(data)

    def close(self) -> None:
        if not self._end.closed:
            self._end.close()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._end.closed
