"""Clients of every kind, in quick succession: answered, refused, disconnecting early, resuming."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import CompleteRequest, GenerationOptions, TokenIds
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.pictures import data_url, png

VOCABULARY = 16_384
_KNOWN = 400  # ids that every tokenizer has
_PROMPT = range(4, 24)
_STOPS, _STOP_LENGTH, _EMOJI = 16, 1024, range(0x1F300, 0x1F5FF)  # the longest that are taken


class Connection:
    """One that is kept alive, over a bare socket."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """The request alone."""
        content = b"" if body is None else json.dumps(body).encode()
        told = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Content-Length": len(content),
        }
        told |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        self._streams[1].write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        """Reads the whole answer. Returns its status."""
        await self.send(method, path, body, **headers)
        status, told = await self.head()
        reader = self._reader
        if told.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        else:
            await reader.readexactly(int(told.get("content-length", 0)))
        if told.get("connection") == "close":
            self.leave()
        return status

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of an answer."""
        reader = self._reader
        status = int((await reader.readline()).split()[1])
        told = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            told[name.lower()] = value.strip()
        return status, told

    async def some(self) -> bytes:
        """What comes next of an answer."""
        return await self._reader.read(256)

    def leave(self) -> None:
        """Hangs up, in the middle of whatever there is."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    @property
    def _reader(self) -> asyncio.StreamReader:
        assert self._streams is not None, "nothing has been asked"
        return self._streams[0]


class Clients:
    """Some clients, each sending one request after another. `counts`: outcomes by kind."""

    def __init__(self, port: int, grpc_address: str, model: str, *, pictures: float) -> None:
        """`pictures`: the share of requests with one."""
        self.counts: Counter[str] = Counter()
        self._port = port
        self._grpc_address = grpc_address
        self._model = model
        self._number = 0
        usual: list[tuple[Callable[[Connection, random.Random], Awaitable[int]], float]] = [
            (self._plain, 0.70 - pictures),
            (self._picture, pictures),
            (self._words, 0.05),
            (self._stream, 0.05),
            (self._several, 0.03),
            (self._twice, 0.02),
            (self._wrong, 0.03),
            (self._leaves, 0.03),
            (self._comes_back, 0.01),
            (self._cancels, 0.01),
            (self._long_lists, 0.01),
            (self._long_stops, 0.002),
            (self._grpc, 0.06),
        ]
        self._kinds = [kind for kind, _ in usual]
        self._weights = [weight for _, weight in usual]
        self._stub: Any = None

    async def run(self, count: int, at_a_time: int, *, only: str = "") -> None:
        """Sends so many requests, of all kinds or of `only` one. Raises RuntimeError if one was told of an internal
        error.
        """
        last = self._number + count
        async with open_channel(self._grpc_address) as channel:
            self._stub = ChatServiceStub(channel)

            async def one() -> None:
                connection = Connection(self._port)
                while self._number < last:
                    self._number += 1
                    rng = random.Random(self._number)
                    (kind,) = rng.choices(self._kinds, self._weights)
                    kind = getattr(self, f"_{only}") if only else kind
                    status = await kind(connection, rng)
                    self.counts[f"{kind.__name__[1:]} {status}"] += 1
                    if status == 500:  # 503 is what a machine with too much to do may say
                        raise RuntimeError(f"{kind.__name__[1:]} was told {status}")
                connection.leave()

            async with asyncio.TaskGroup() as group:
                for _ in range(at_a_time):
                    group.create_task(one())

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        prompt = [rng.randrange(2, _KNOWN) for _ in range(rng.choice(_PROMPT))]
        return {"model": self._model, "prompt": prompt, "max_tokens": 1, **more}

    async def _plain(self, connection: Connection, rng: random.Random) -> int:
        return await connection.ask("POST", "/v1/completions", self._body(rng))

    async def _picture(self, connection: Connection, rng: random.Random) -> int:
        url = {"url": data_url(png(rng.randrange(1 << 20), (96, 96)))}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What?"}]
        return await self._chat(connection, content)

    async def _words(self, connection: Connection, rng: random.Random) -> int:
        return await self._chat(connection, f"What is {rng.random()} of {rng.random()}?")

    async def _chat(self, connection: Connection, content: Any) -> int:
        messages = [{"role": "user", "content": content}]
        body = {"model": self._model, "messages": messages, "max_tokens": 1}
        return await connection.ask("POST", "/v1/chat/completions", body)

    async def _stream(self, connection: Connection, rng: random.Random) -> int:
        more = {"stream": True, "max_tokens": 4, "logprobs": 2, "stop": ["never"], "user": "ann"}
        name = f"own-{rng.getrandbits(64):x}"
        body = self._body(rng, **more)
        return await connection.ask("POST", "/v1/completions", body, X_Request_Id=name)

    async def _several(self, connection: Connection, rng: random.Random) -> int:
        more: dict[str, Any] = rng.choice(
            [{"n": 3}, {"best_of": 3}, {"use_beam_search": True, "best_of": 2}]
        )
        if rng.random() < 0.3:
            more = {"prompt": [[5, 6, 7], [8, 9, rng.randrange(_KNOWN)]], "prompt_logprobs": 1}
        return await connection.ask(
            "POST", "/v1/completions", self._body(rng, **{"max_tokens": 2, **more})
        )

    async def _twice(self, connection: Connection, rng: random.Random) -> int:
        body, key = self._body(rng), f"{rng.getrandbits(64):x}"
        await connection.ask("POST", "/v1/completions", body, Idempotency_Key=key)
        return await connection.ask("POST", "/v1/completions", body, Idempotency_Key=key)

    async def _wrong(self, connection: Connection, rng: random.Random) -> int:
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"temperature": 9}),
            ("/v1/completions", {"model": f"no-{rng.random()}"}),
            ("/v1/completions", {"prompt": [1] * 3000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}]}]}),
            (f"/v1/nothing/{rng.random()}", {}),
        ]
        path, more = rng.choice(wrong)
        return await connection.ask("POST", path, self._body(rng, **more))

    async def _leaves(self, connection: Connection, rng: random.Random) -> int:
        body = self._body(rng, stream=True, max_tokens=200, ignore_eos=True)
        await connection.send("POST", "/v1/completions", body)
        if rng.random() < 0.7:
            await connection.head()
            await connection.some()
        connection.leave()
        return 0

    async def _comes_back(self, connection: Connection, rng: random.Random) -> int:
        body = self._body(rng, stream=True, max_tokens=20, ignore_eos=True)
        await connection.send("POST", "/v1/completions", body, X_Tessera_Resume="5")
        _, told = await connection.head()
        await connection.some()
        connection.leave()
        return await connection.ask("GET", f"/v1/requests/{told['x-request-id']}/stream")

    async def _cancels(self, connection: Connection, rng: random.Random) -> int:
        body = self._body(rng, stream=True, max_tokens=200, ignore_eos=True)
        await connection.send("POST", "/v1/completions", body)
        _, told = await connection.head()
        other = Connection(self._port)
        status = await other.ask("DELETE", f"/v1/requests/{told['x-request-id']}")
        other.leave()
        connection.leave()
        return status

    async def _long_lists(self, connection: Connection, rng: random.Random) -> int:
        name = rng.choice(["bad_token_ids", "allowed_token_ids", "stop_token_ids"])
        body = self._body(rng, **{name: list(range(1, VOCABULARY))})
        return await connection.ask("POST", "/v1/completions", body)

    async def _long_stops(self, connection: Connection, rng: random.Random) -> int:
        """Of four answers each is searched for as much text as can be asked for."""
        stops = ["".join(map(chr, rng.choices(_EMOJI, k=_STOP_LENGTH))) for _ in range(_STOPS)]
        body = self._body(rng, stop=stops, n=4, max_tokens=8)
        return await connection.ask("POST", "/v1/completions", body)

    async def _grpc(self, connection: Connection, rng: random.Random) -> int:
        ids = [rng.randrange(2, _KNOWN) for _ in range(8)]
        most = rng.choice([1, 1, 1, 100])
        options = GenerationOptions(max_tokens=most, ignore_eos=True, cache_salt=str(most))
        call = self._stub.Complete(CompleteRequest(token_ids=TokenIds(ids=ids), options=options))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for event in call:
                if most > 1 and event.WhichOneof("event") == "delta":
                    call.cancel()
                    break
        return 0
