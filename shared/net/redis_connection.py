"""Connections to Redis that are read and written without the client library's own loop.

The library takes a connection out of its pool for each command, and measures, times and guards each one: ten times the
processor time of the command itself, where every step and every request calls scripts. It still finds the server,
logs in and speaks TLS; what it has connected is then read and written here.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import hiredis
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError

from shared.errors import Unavailable
from shared.net.redis_run import Runs

Word = str | bytes | int | float

_SILENCE_S = 5.0  # a Redis that owes an answer for so long is taken for dead
_NOTHING = object()
_pack = cast(Callable[[tuple[Word, ...]], bytes], hiredis.pack_command)


class ErrorReply(Exception):
    """Redis refused a command; the message begins with its kind, such as NOSCRIPT."""


def _away(error: Exception) -> Unavailable:
    return Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}")


class RedisLine:
    """One connection that many callers share: commands leave at once, answers come in their order.

    It is made when it is first needed, and made again when it broke. It ends with its client.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self.runs = Runs()
        self._greeted = True
        self._pool = pool
        self._wire: _Wire | None = None
        self._connecting = asyncio.Lock()

    async def call(self, *command: Word) -> Any:
        """The answer to one command. Raises ErrorReply, or Unavailable when there is no Redis."""
        answer = (await self.call_all([command]))[0]
        if isinstance(answer, hiredis.ReplyError):
            raise ErrorReply(str(answer))
        return answer

    async def call_all(self, commands: "list[tuple[Word, ...]]") -> list[Any]:
        """The answers to commands that leave together; that of a refused one is a `hiredis.ReplyError`.

        Who stops waiting does not take commands back. Raises Unavailable, also where the connection breaks before the
        answers have come: nobody knows then what was executed.
        """
        packed = b"".join([_pack(command) for command in commands])
        wire = self._wire
        if wire is None or wire.closed or not self._greeted:
            wire = await self._connect()
        return await wire.send(packed, len(commands))

    def watch(self, prefix: str, greeting: str) -> None:
        """From now on, greets Redis with this script before anything else is said about keys with this prefix."""
        if self.runs.watch(prefix, greeting):
            self._greeted = False

    def hang_up(self) -> None:
        """Ends the connection: the next command is sent on another."""
        if self._wire is not None:
            self._wire.hang_up()

    async def _connect(self) -> "_Wire":
        async with self._connecting:
            if self._wire is not None and self._wire.closed:
                await self._wire.give_back()
                self._wire = None
            if self._wire is None or not self._greeted:
                self._greeted = True
                wire = self._wire or _Wire(self._pool)
                try:
                    await wire.open()
                    await self.runs.greet(wire.ask)
                except BaseException:
                    self._wire, self._greeted = None, False
                    await wire.give_back()
                    raise
                self._wire = wire
            return self._wire


_lines: WeakKeyDictionary[Redis, RedisLine] = WeakKeyDictionary()


def line_of(redis: Redis) -> RedisLine:
    """The line of a client, one for each."""
    line = _lines.get(redis)
    if line is None:
        line = _lines[redis] = RedisLine(redis.connection_pool)
    return line


class _Taken(asyncio.Protocol, ABC):
    """A connection out of the client's pool, with its answers delivered to `received`."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.closed = False
        self._pool = pool
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._connection: Any = None
        self._transport: asyncio.Transport
        self._before: asyncio.Protocol

    async def open(self) -> None:
        """Connects and logs in. Raises Unavailable."""
        try:
            # A frozen server takes connections and says nothing.
            async with asyncio.timeout(_SILENCE_S):
                self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                await self._begin(self._connection)
        except (RedisError, OSError, TimeoutError) as error:
            await self.give_back()
            raise _away(error) from error
        self._transport = cast(asyncio.Transport, self._connection._writer.transport)
        self._before = cast(asyncio.Protocol, self._transport.get_protocol())
        self._transport.set_protocol(self)

    async def _begin(self, connection: Any) -> None:
        """What is said while the client library still reads the answers."""

    async def give_back(self) -> None:
        """Hangs up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not _NOTHING:
            self.received(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self.closed = True
        self._before.connection_lost(error)  # somebody may wait there for the end
        self.ended(error or ConnectionError("the connection ended"))

    @abstractmethod
    def received(self, answer: Any) -> None:
        """Takes an answer."""

    @abstractmethod
    def ended(self, error: Exception) -> None:
        """No more will come."""


class _Wire(_Taken):
    """The connection of a line, as long as it lasts."""

    def __init__(self, pool: ConnectionPool) -> None:
        super().__init__(pool)
        self._loop = asyncio.get_running_loop()
        # Of each call under way: who waits, how many answers are due, those that came.
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int, list[Any]]] = deque()
        self._owed_since = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connects, unless it is connected. Raises Unavailable."""
        if self._connection is None:
            await super().open()

    async def ask(self, *command: Word) -> Any:
        """The answer to one command of the connection's own. Raises Unavailable, also where Redis refuses it."""
        (answer,) = await self.send(_pack(command), 1)
        if isinstance(answer, hiredis.ReplyError):
            raise _away(answer)
        return answer

    def hang_up(self) -> None:
        """Ends the connection at once."""
        self.closed = True
        self._transport.abort()

    def send(self, packed: bytes, answers: int) -> "asyncio.Future[list[Any]]":
        """Writes commands; the future gets their answers, or Unavailable."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        if not self._waiting:
            self._owed_since = self._loop.time()
            if self._watch is None:
                self._watch = self._loop.call_later(_SILENCE_S, self._look)
        self._waiting.append((future, answers, []))
        self._transport.write(packed)
        return future

    def received(self, answer: Any) -> None:
        """Hands an answer to who waits for it."""
        if isinstance(answer, hiredis.PushNotification) or not self._waiting:
            return  # news that nobody asked for
        future, due, answers = self._waiting[0]
        answers.append(answer)
        self._owed_since = self._loop.time()
        if len(answers) == due:
            self._waiting.popleft()
            if not future.done():  # whoever waited may have left
                future.set_result(answers)

    def ended(self, error: Exception) -> None:
        """Tells all who wait."""
        if self._watch is not None:
            self._watch.cancel()
        for future, _, _ in self._waiting:
            if not future.done():
                future.set_exception(_away(error))
        self._waiting.clear()

    def _look(self) -> None:
        """Every few seconds while there is traffic: a timer for each command would cost more than the command."""
        self._watch = None
        if self._waiting:
            if self._loop.time() - self._owed_since > _SILENCE_S:
                self._transport.abort()
            else:
                self._watch = self._loop.call_later(_SILENCE_S, self._look)


class Subscription(_Taken):
    """A connection that only listens to one channel. `open`, `messages` until it raises, `give_back`."""

    def __init__(self, redis: Redis, channel: str) -> None:
        super().__init__(redis.connection_pool)
        self._runs = line_of(redis).runs
        self._channel = channel
        self._messages: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def open(self) -> None:
        """Subscribes. Raises Unavailable."""
        await super().open()
        self._transport.write(_pack(("SUBSCRIBE", self._channel)))

    async def _begin(self, connection: Any) -> None:
        async def ask(*command: Word) -> Any:
            await connection.send_command(*command)
            return await connection.read_response()

        await self._runs.greet(ask)

    async def messages(self) -> list[bytes]:
        """Waits for messages; all that have come, in order. Raises Unavailable when the connection broke."""
        while not self._messages:
            if self._error is not None:
                raise _away(self._error)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found, self._messages = self._messages, []
        return found

    def received(self, answer: Any) -> None:
        """Keeps what was published."""
        if isinstance(answer, hiredis.ReplyError):
            self.ended(answer)
        elif answer[0] == b"message":
            self._messages.append(answer[2])
            self._wake()

    def ended(self, error: Exception) -> None:
        """Lets `messages` raise."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
