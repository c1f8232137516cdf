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
from shared.net.redis.run import Runs

Word = str | bytes | int | float

_CONNECTING_S = 5.0
_SILENCE_S = 5.0  # a Redis that owes an answer for so long counts as dead
_NOTHING = object()
_pack = cast(Callable[[tuple[Word, ...]], bytes], hiredis.pack_command)


class ErrorReply(Exception):
    """Redis refused a command; the message begins with its kind, such as NOSCRIPT."""


def _away(error: Exception) -> Unavailable:
    return Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}")


class RedisConnection:
    """One connection that many callers share: commands leave at once, answers come in their order.

    It connects at the first command, and again after a break. It ends with its client.
    """

    def __init__(self, pool: ConnectionPool, silence_s: float = _SILENCE_S) -> None:
        """A Redis that owes an answer for `silence_s` counts as dead."""
        self.runs = Runs()
        self._silence_s = silence_s
        self._checked = True
        self._pool = pool
        self._stream: _CommandStream | None = None
        self._connecting = asyncio.Lock()

    async def call(self, *command: Word) -> Any:
        """The answer to one command. Raises ErrorReply, or Unavailable when there is no Redis."""
        answer = (await self.call_all([command]))[0]
        if isinstance(answer, hiredis.ReplyError):
            raise ErrorReply(str(answer))
        return answer

    async def call_all(self, commands: "list[tuple[Word, ...]]") -> list[Any]:
        """The answers to commands that leave together; that of a refused one is a `hiredis.ReplyError`.

        Cancelling the call does not take the commands back. Raises Unavailable, also where the connection breaks
        before the answers have come: what was executed is not known then.
        """
        packed = b"".join([_pack(command) for command in commands])
        stream = self._stream
        if stream is None or stream.closed or not self._checked:
            stream = await self._connect()
        return await stream.send(packed, len(commands))

    def check_runs(self, prefix: str, script: str) -> None:
        """From now on every new connection runs `script` first, which finds out whether Redis has restarted."""
        if self.runs.add(prefix, script):
            self._checked = False

    def abort(self) -> None:
        """Ends the connection: the next command is sent on another."""
        if self._stream is not None:
            self._stream.abort()

    async def _connect(self) -> "_CommandStream":
        async with self._connecting:
            if self._stream is not None and self._stream.closed:
                await self._stream.give_back()
                self._stream = None
            if self._stream is None or not self._checked:
                self._checked = True
                stream = self._stream or _CommandStream(self._pool, self._silence_s)
                try:
                    await stream.open()
                    await self.runs.check(stream.ask)
                except BaseException:
                    self._stream, self._checked = None, False
                    await stream.give_back()
                    raise
                self._stream = stream
            return self._stream


_connections: WeakKeyDictionary[Redis, RedisConnection] = WeakKeyDictionary()


def connection_of(redis: Redis) -> RedisConnection:
    """The shared connection of a client, one for each."""
    connection = _connections.get(redis)
    if connection is None:
        connection = _connections[redis] = RedisConnection(redis.connection_pool)
    return connection


class _PooledConnection(asyncio.Protocol, ABC):
    """A connection taken out of the client's pool; its answers are delivered to `received`."""

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
            # A frozen server accepts connections and never answers.
            async with asyncio.timeout(_CONNECTING_S):
                self._connection = await self._pool.get_connection()
                await self._begin(self._connection)
        except (RedisError, OSError, TimeoutError) as error:
            await self.give_back()
            raise _away(error) from error
        # The client library sends by `asyncio.wait_for`, which until Python 3.12 forgets a cancellation that comes as
        # what it waits for ends.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            await self.give_back()
            raise asyncio.CancelledError
        self._transport = cast(asyncio.Transport, self._connection._writer.transport)
        self._before = cast(asyncio.Protocol, self._transport.get_protocol())
        self._transport.set_protocol(self)

    async def _begin(self, connection: Any) -> None:
        """Commands to send while the client library still reads the answers."""

    async def give_back(self) -> None:
        """Disconnects and returns the connection to its pool."""
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
        self._before.connection_lost(error)  # a caller may be waiting there for the end
        self.ended(error or ConnectionError("the connection ended"))

    @abstractmethod
    def received(self, answer: Any) -> None:
        """Takes an answer."""

    @abstractmethod
    def ended(self, error: Exception) -> None:
        """No more will come."""


class _CommandStream(_PooledConnection):
    """One pooled connection with commands in flight; closed for good when it breaks."""

    def __init__(self, pool: ConnectionPool, silence_s: float) -> None:
        super().__init__(pool)
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        # Of each call under way: who waits, how many answers are due, those that came.
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int, list[Any]]] = deque()
        self._last_answer = 0.0
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

    def abort(self) -> None:
        """Ends the connection at once."""
        self.closed = True
        self._transport.abort()

    def send(self, packed: bytes, answers: int) -> "asyncio.Future[list[Any]]":
        """Writes commands; the future gets their answers, or Unavailable."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        if not self._waiting:
            self._last_answer = self._loop.time()
            if self._watch is None:
                self._watch = self._loop.call_later(self._silence_s, self._check_silence)
        self._waiting.append((future, answers, []))
        self._transport.write(packed)
        return future

    def received(self, answer: Any) -> None:
        """Hands an answer to the call that waits for it."""
        if isinstance(answer, hiredis.PushNotification) or not self._waiting:
            return  # a push message, or an answer that no call waits for
        future, due, answers = self._waiting[0]
        answers.append(answer)
        self._last_answer = self._loop.time()
        if len(answers) == due:
            self._waiting.popleft()
            if not future.done():  # whoever waited may have left
                future.set_result(answers)

    def ended(self, error: Exception) -> None:
        """Fails all waiting calls."""
        if self._watch is not None:
            self._watch.cancel()
        for future, _, _ in self._waiting:
            if not future.done():
                future.set_exception(_away(error))
        self._waiting.clear()

    def _check_silence(self) -> None:
        """Every few seconds while there is traffic: a timer for each command would cost more than the command."""
        self._watch = None
        if self._waiting:
            if self._loop.time() - self._last_answer > self._silence_s:
                self._transport.abort()
            else:
                self._watch = self._loop.call_later(self._silence_s, self._check_silence)


class Subscription(_PooledConnection):
    """A connection that only listens to one channel. `open`, `messages` until it raises, `give_back`."""

    def __init__(self, redis: Redis, channel: str) -> None:
        super().__init__(redis.connection_pool)
        self._runs = connection_of(redis).runs
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

        await self._runs.check(ask)

    async def messages(self) -> list[bytes]:
        """Waits for messages; returns all that have come, in order. Raises Unavailable when the connection broke."""
        while not self._messages:
            if self._error is not None:
                raise _away(self._error)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found, self._messages = self._messages, []
        return found

    def received(self, answer: Any) -> None:
        """Keeps a published message."""
        if isinstance(answer, hiredis.ReplyError):
            self.ended(answer)
        elif answer[0] == b"message":
            self._messages.append(answer[2])
            self._wake()

    def ended(self, error: Exception) -> None:
        """Makes `messages` raise."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
