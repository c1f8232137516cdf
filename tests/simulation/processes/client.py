"""Clients of the gRPC API. They send requests, read answers, reconnect after a broken connection, send the same request
twice, disconnect early, and compare what they receive with the text of an undisturbed run.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from services.decoder.steps.needs import Needs
from services.gateway.admission.cache_salt import salt_of
from services.gateway.admission.caller import Caller, tenant_of
from shared.artifacts.embedding_name import embedding_name
from shared.net.channels import open_channel
from tessera.common.v1.ending_pb2 import FinishReason
from tessera.gateway.v1.chat_pb2 import (
    ChatEvent,
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    FollowRequest,
    GenerationOptions,
    TokenIds,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.simulation.processes.arithmetic import CONTENT, NUMERICS
from tests.simulation.processes.media_services import PLACEHOLDER, ROWS, digest_of, picture_values
from tests.simulation.surroundings import pieces
from tests.simulation.virtual_loop import Process
from tests.support.arithmetic.model import MODEL, first_state, has_prefix, root_of

if TYPE_CHECKING:
    from tests.simulation.world import World

_PREFIX = [7, 21, 14, 93, 5, 60, 77, 12, 31, 8, 44, 150, 19, 2, 88, 101]
_AGAIN_S = 0.3
PATIENCE_S = 90.0

DEADLY = (199, 198, 199, 198, 199)  # whose prompt begins so ends decoders
_POISONED = "decoders were lost while they ran this request"

PLAIN, RESUMES, HAS_KEY = "plain", "resumes", "has a key"


@dataclass(frozen=True)
class DrawnRequest:
    """What a client wants, and what an undisturbed run gives it."""

    kind: str
    prompt: list[int]
    picture: bytes  # comes before the last token of the prompt; empty is none
    max_tokens: int
    n: int
    ignore_eos: bool
    user: str
    keep_s: int
    timeout_s: float | None
    stop: str  # ends an answer that it stands in; empty is none
    key: str  # for the API; empty where none is needed
    cache_salt: str
    expected: list[list[int]]
    texts: list[str]

    @classmethod
    def draw(
        cls,
        rng: random.Random,
        key: str,
        cache_salt: str,
        needs: Needs,
        content: bytes = CONTENT,
    ) -> "DrawnRequest":
        """A random request with this API key, to a model with these needs and weights."""
        shared = rng.choice([0, 8, 16])
        prompt = _PREFIX[:shared] + [
            rng.randrange(1, MODEL.vocabulary) for _ in range(rng.randint(1, 12))
        ]
        max_tokens, n = rng.choice([1, 3, 10, 25, 60]), rng.choice([1, 1, 1, 2, 3])
        ignore_eos = rng.random() < 0.3
        picture = rng.choice([b"", b"", b"a cat", b"a dog", b"a map"])
        values, ids, media = prompt, prompt, {}
        if picture:
            values = [*prompt[:-1], *picture_values(picture, content), prompt[-1]]
            ids = [*prompt[:-1], *[PLACEHOLDER] * ROWS, prompt[-1]]
            media = {len(prompt) - 1: embedding_name(content, digest_of(picture), NUMERICS)}
        stops = not ignore_eos
        root = root_of(needs, _salt(key, cache_salt), ids, media, content=content)
        first = first_state(root, values if has_prefix(needs) else ())
        expected = [MODEL.generate(values, c, max_tokens, stops, first) for c in range(n)]
        stop = _a_part_of(expected[0], rng) if rng.random() < 0.3 else ""
        ended = [_until(stop, tokens) for tokens in expected]
        return cls(
            kind=rng.choice([PLAIN, RESUMES, RESUMES, HAS_KEY]),
            prompt=prompt,
            picture=picture,
            max_tokens=max_tokens,
            n=n,
            ignore_eos=ignore_eos,
            user=rng.choice(["", "ann", "bob"]),
            keep_s=rng.choice([2, 20]),
            timeout_s=rng.uniform(0.5, 5.0) if rng.random() < 0.1 else None,
            stop=stop,
            key=key,
            cache_salt=cache_salt,
            expected=[tokens for tokens, _ in ended],
            texts=[text for _, text in ended],
        )

    @classmethod
    def plain(
        cls, prompt: list[int], max_tokens: int, key: str = "", content: bytes = CONTENT
    ) -> "DrawnRequest":
        """A completion of exactly so many tokens, for a model without special needs."""
        first = first_state(root_of(Needs(), _salt(key, ""), prompt, {}, content=content))
        tokens, text = _until("", MODEL.generate(prompt, 0, max_tokens, False, first))
        return cls(
            kind=PLAIN,
            prompt=prompt,
            picture=b"",
            max_tokens=max_tokens,
            n=1,
            ignore_eos=True,
            user="",
            keep_s=20,
            timeout_s=None,
            stop="",
            key=key,
            cache_salt="",
            expected=[tokens],
            texts=[text],
        )

    @property
    def is_deadly(self) -> bool:
        """Whether it makes decoders crash."""
        return tuple(self.prompt[: len(DEADLY)]) == DEADLY

    def reason(self, choice: int) -> int:
        """How a choice ends."""
        if self.stop and self.stop.encode() in _bytes_of(self.expected[choice]):
            return FinishReason.FINISH_REASON_STOP
        if not self.ignore_eos and self.expected[choice][-1] == MODEL.stop_token:
            return FinishReason.FINISH_REASON_STOP
        return FinishReason.FINISH_REASON_LENGTH


def _bytes_of(tokens: list[int]) -> bytes:
    table = pieces()
    return b"".join(table[token] for token in tokens)


def _a_part_of(tokens: list[int], rng: random.Random) -> str:
    """A stop string that occurs in the text of these tokens."""
    begin = rng.randrange(len(tokens))
    try:
        return _bytes_of(tokens[begin : begin + rng.randint(1, 3)]).decode("ascii")
    except UnicodeDecodeError:
        return ""


def _until(stop: str, tokens: list[int]) -> tuple[list[int], str]:
    """The tokens up to the one that completes the stop string, and the text before that."""
    raw = stop.encode()
    for count in range(1, len(tokens) + 1):
        text = _bytes_of(tokens[:count])
        if raw and raw in text:
            return tokens[:count], text[: text.index(raw)].decode("utf-8", "replace")
    return tokens, _bytes_of(tokens).decode("utf-8", "replace")


def _salt(key: str, cache_salt: str) -> bytes:
    return salt_of(tenant_of(Caller("", api_key=key), "") if key else "", cache_salt)


def _draw(world: "World", number: int, rng: random.Random) -> DrawnRequest:
    whose = random.Random(f"{world.seed}/whose {number}")
    salt = whose.choice(["", "", "s", "t"])
    return DrawnRequest.draw(rng, whose.choice(world.keys), salt, world.needs)


def _chat(request: DrawnRequest, options: GenerationOptions) -> ChatRequest:
    parts = [
        ContentPart(text=" ".join(map(str, request.prompt[:-1]))),
        ContentPart(image=request.picture),
        ContentPart(text=str(request.prompt[-1])),
    ]
    return ChatRequest(messages=[ChatMessage(role="user", content=parts)], options=options)


class Client:
    """One request, read by one reader, or by two at once where it has an idempotency key."""

    def __init__(
        self,
        world: "World",
        number: int,
        rng: random.Random,
        request: DrawnRequest | None = None,
        begins: float = 0.0,
        reader: "type[Reader] | None" = None,
    ) -> None:
        """With a `request` the client starts at `begins` and reads to the end; else all three are drawn."""
        self.name = f"client-{number}"
        self.done = False
        self.request = request or _draw(world, number, rng)
        self._world = world
        self._process = Process(self.name)
        self._begins = rng.uniform(0.3, 4.0)
        self._leaves_after = rng.uniform(0.05, 2.0) if rng.random() < 0.15 else None
        if request is not None:
            self._begins, self._leaves_after = begins, None
        reader = reader or Reader
        count = 2 if self.request.kind == HAS_KEY and rng.random() < 0.5 else 1
        self.readers = [
            reader(
                world, f"{self.name}{'ab'[i] if count > 1 else ''}", self.name, self.request, rng
            )
            for i in range(count)
        ]

    @property
    def state(self) -> str:
        """What it is waiting for, or the outcome."""
        return "; ".join(reader.state for reader in self.readers)

    @property
    def num_tokens(self) -> int:
        """Tokens that it was given."""
        return sum(len(tokens) for reader in self.readers for tokens in reader.tokens)

    def start(self) -> None:
        """Schedules the first call for its time."""
        self._world.loop.spawn(self._process, self._live())

    async def _live(self) -> None:
        await asyncio.sleep(self._begins)
        reading = [asyncio.create_task(reader.read()) for reader in self.readers]
        await asyncio.wait(reading, timeout=self._leaves_after)
        for task, reader in zip(reading, self.readers, strict=True):
            if not task.done():
                self._world.trace(f"{reader.name} leaves")
                task.cancel()
                reader.state = "left"
        await asyncio.wait(reading)
        for task in reading:
            if not task.cancelled():
                task.result()
        self.done = True
        self._world.trace(f"{self.name} is done: {self.state}")


class Reader:
    """Reads an answer to its end, over as many calls as it takes."""

    def __init__(
        self, world: "World", name: str, key: str, request: DrawnRequest, rng: random.Random
    ) -> None:
        self.name = name
        self.state = "not begun"
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]
        self._texts = [""] * request.n
        self._finished = [False] * request.n
        self._world = world
        self._key = key
        self._request = request
        self._rng = random.Random(rng.getrandbits(32))
        self._request_id = ""
        self._event_id = ""
        self._began = 0.0
        self._received_at = 0.0

    async def read(self) -> None:
        """Calls until the answer is complete or has failed for good."""
        loop = self._world.loop
        self._began = loop.now
        while loop.now < self._began + PATIENCE_S:
            if not await self._try():
                return
            await asyncio.sleep(_AGAIN_S)
        self._world.broken(f"{self.name} was never served: {self.state}")

    async def _try(self) -> bool:
        """One call. Returns whether to make another."""
        gateways = [
            service for service in self._world.services if service.name.startswith("gateway")
        ]
        address = f"{self._rng.choice(gateways).name}:1"
        self.state = f"asks {address}"
        async with open_channel(address) as line:
            try:
                async for event in self._call(ChatServiceStub(line)):
                    self._receive(event)
            except grpc.aio.AioRpcError as error:
                return self._goes_on_after(error)
        self.state = "served"
        if self._request.is_deadly:
            self._broken("was served with what ends decoders")
        if not all(self._finished):
            self._world.broken(f"{self.name}: the stream ended before its choices did")
        return False

    def _call(self, stub: Any) -> AsyncIterator[ChatEvent]:
        request = self._request
        metadata = [("authorization", f"Bearer {request.key}")] if request.key else []
        if self._request_id and request.kind == RESUMES:
            following = FollowRequest(
                request_id=self._request_id, after=self._event_id, user=request.user
            )
            calls: AsyncIterator[ChatEvent] = stub.Follow(following, metadata=metadata)
            return calls
        options = GenerationOptions(
            max_tokens=request.max_tokens,
            n=request.n,
            ignore_eos=request.ignore_eos,
            return_token_ids=True,
            user=request.user,
            stop=[request.stop] if request.stop else [],
            temperature=1.0,
            seed=1,
        )
        if request.timeout_s is not None:
            options.timeout = request.timeout_s
        if request.cache_salt:
            options.cache_salt = request.cache_salt
        if request.kind == HAS_KEY:
            metadata.append(("idempotency-key", self._key))
            if self._event_id:
                metadata.append(("last-event-id", self._event_id))
        if request.kind != PLAIN:
            metadata.append(("x-tessera-resume", str(request.keep_s)))
        if request.picture:
            return stub.Chat(_chat(request, options), metadata=metadata)  # type: ignore[no-any-return]
        completion = CompleteRequest(token_ids=TokenIds(ids=request.prompt), options=options)
        return stub.Complete(completion, metadata=metadata)  # type: ignore[no-any-return]

    def _receive(self, event: ChatEvent) -> None:
        self._event_id = event.event_id
        self._received_at = self._world.loop.now
        match event.WhichOneof("event"):
            case "accepted":
                self._accepted(event.accepted.request_id)
            case "delta":
                self._texts[event.delta.choice] += event.delta.text
                self._take(event.delta.choice, list(event.delta.token_ids))
            case "finished":
                self._finish(event.finished.choice, event.finished.reason)

    def _accepted(self, request_id: str) -> None:
        self._world.trace(f"{self.name} is accepted as {request_id}")
        if self._request_id and (self._request.kind == RESUMES or any(self.tokens)):
            self._broken(f"is called {request_id} and was called {self._request_id}")
        self._request_id = request_id

    def _take(self, choice: int, tokens: list[int]) -> None:
        have, want = self.tokens[choice], self._request.expected[choice]
        if self._finished[choice]:
            self._broken(f"tokens after the end of choice {choice}")
        if want[len(have) : len(have) + len(tokens)] != tokens:
            right = want[len(have) : len(have) + 5]
            self._broken(f"choice {choice}: {tokens} after {len(have)}; undisturbed {right}")
        have += tokens

    def _finish(self, choice: int, reason: int) -> None:
        have, want = self.tokens[choice], self._request.expected[choice]
        if self._finished[choice]:
            self._broken(f"choice {choice} ended twice")
        self._finished[choice] = True
        if have != want:
            self._broken(f"choice {choice} ended with {len(have)} of {len(want)} tokens")
        if self._texts[choice] != self._request.texts[choice]:
            received, right = self._texts[choice], self._request.texts[choice]
            self._broken(f"choice {choice} has the text {received!r} in place of {right!r}")
        if reason != self._request.reason(choice):
            self._broken(f"choice {choice} ended for the reason {reason}")

    def _broken(self, what: str) -> None:
        self._world.broken(f"{self.name} ({self._request_id}): {what}")

    def _may_have_ended(self, waited: float) -> bool:
        """Whether the request may be gone: its keep time has passed, or it timed out and released its key."""
        away, timeout_s = self._world.loop.now - self._received_at, self._request.timeout_s
        return away >= self._request.keep_s or (timeout_s is not None and waited >= timeout_s)

    def _goes_on_after(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether to try again after an error. An error that no client should get is recorded as a failure."""
        self.state = f"{error.code().name}: {error.details()}"
        self._world.trace(f"{self.name} receives {self.state}")
        request, waited = self._request, self._world.loop.now - self._began
        match error.code():
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.RESOURCE_EXHAUSTED:
                # Accepted and cut off: a plain client cannot come back.
                return request.kind != PLAIN or not self._request_id
            case grpc.StatusCode.DEADLINE_EXCEEDED if (
                request.timeout_s and waited >= request.timeout_s
            ):
                return False
        is_gone = error.code() is grpc.StatusCode.NOT_FOUND or "another request" in self.state
        if is_gone and (self._world.may_have_lost_requests or self._may_have_ended(waited)):
            return False
        if "were lost 3 times" in self.state and self._world.faults.has_kept_pictures_away:
            return False  # the end that is written for this
        if _POISONED in self.state and (request.is_deadly or self._world.may_blame_others):
            return False  # so is this
        self._broken(f"received {self.state}")
        return False
