"""The twins on a real socket: what tests of the queue ask of Lua on Redis they ask of Python here, word for word."""

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hiredis

from tests.simulation.redis_model import RedisError, RedisModel, Reply, Status
from tests.simulation.redis_room import resp
from tests.simulation.scripts import twin_of


class TwinServer:
    """`with TwinServer(path) as server:` answers at `server.url`, in real time, in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self._path = path
        self._model = RedisModel(lambda: time.time_ns() // 1000)
        self._model.published = self._publish
        self._subscribers: dict[str, list[asyncio.StreamWriter]] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _work(self) -> None:
        listening = asyncio.start_unix_server(self._serve, self._path)
        server = self._loop.run_until_complete(listening)
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = hiredis.Reader(notEnoughData=...)
        try:
            while data := await reader.read(1 << 16):
                words.feed(data)
                while (command := words.gets()) is not ...:
                    writer.write(self._answer(writer, [str(w, "latin-1") for w in command]))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for listening in self._subscribers.values():
                if writer in listening:
                    listening.remove(writer)
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, words: list[str]) -> bytes:
        name = words[0].upper()
        if name == "HELLO":
            return b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n"
        if name == "SUBSCRIBE":
            self._subscribers.setdefault(words[1], []).append(writer)
            return resp(["subscribe", words[1], 1])
        try:
            return resp(self._run(name, words))
        except RedisError as error:
            return b"-" + str(error).encode() + b"\r\n"

    def _run(self, name: str, words: list[str]) -> Reply:
        if name == "CLIENT":
            return Status("OK")
        if name not in ("EVAL", "EVALSHA"):
            return self._model.call(name, *words[1:])
        _, run, _ = twin_of(words[1])
        count = int(words[2])
        return run(self._model, words[3 : 3 + count], words[3 + count :])

    def _publish(self, channel: str, message: str) -> None:
        data: Any = resp(["message", channel, message])
        for writer in self._subscribers.get(channel, ()):
            writer.write(data)
