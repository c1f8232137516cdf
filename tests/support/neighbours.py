"""The gateway's neighbours, played by the test through their real contracts.

`PreprocessPlayer` is a PreprocessService on a real gRPC server with a real tokenizer;
`SchedulerPlayer` takes requests from the real queue and appends what the test tells it to, ending
them by the rules of the real scheduler.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tokenizers import Tokenizer

from shared import tasks
from shared.errors import InvalidRequest
from shared.keys import Keys, new_instance_id
from shared.queue import Append, AppendCode, Queue, TakenRequest, connect
from shared.registry import Announcement
from shared.rpc import RoomServer
from shared.text import StopFinder, TokenBytes
from shared.token_log import decode_tokens, encode_tokens
from tessera.common.v1.ending_pb2 import Ending, Failure, FinishReason
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1 import preprocess_pb2_grpc
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest, PrepareResponse
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad, GetLoadResponse

IMAGE_TOKENS = 4


class PreprocessPlayer(preprocess_pb2_grpc.PreprocessServiceServicer):
    """Renders `role: text` lines, IMAGE_TOKENS placeholders for each picture. Announces itself in
    the registry.
    """

    def __init__(self, redis_url: str, model_name: str, tokenizer: Tokenizer) -> None:
        self._redis_url = redis_url
        self._keys = Keys(model_name)
        self._tokenizer = tokenizer
        self._stack = contextlib.AsyncExitStack()
        self.seen: list[PrepareRequest] = []
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self) -> Self:
        server = await self._stack.enter_async_context(RoomServer("127.0.0.1:0", grace_s=0.1))
        server.add(
            "tessera.preprocess.v1.PreprocessService",
            preprocess_pb2_grpc.add_PreprocessServiceServicer_to_server,
            self,
        )
        await server.ready()
        redis = connect(self._redis_url)
        self._stack.push_async_callback(redis.aclose)
        self.address = server.address
        self.server = server
        await self._stack.enter_async_context(
            Announcement(redis, self._keys, "preprocess", new_instance_id(), server.address)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareResponse:
        """The contract's method."""
        self.seen.append(request)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        kind = request.WhichOneof("input")
        media: list[MediaItem] = []
        ids: list[int] = []
        if kind == "token_ids":
            ids = decode_tokens(request.token_ids)
        elif kind == "text":
            ids = self._tokenizer.encode(request.text).ids
        else:
            for message in request.conversation.messages:
                ids += self._tokenizer.encode(f"{message.role}: ").ids
                for part in message.content:
                    if part.WhichOneof("part") == "text":
                        ids += self._tokenizer.encode(part.text).ids
                        continue
                    media.append(MediaItem(digest=b"d" * 16, offset=len(ids), length=IMAGE_TOKENS))
                    ids += [self._tokenizer.token_to_id("<image>")] * IMAGE_TOKENS
        if request.max_prompt_tokens and len(ids) > request.max_prompt_tokens:
            raise InvalidRequest(
                "PROMPT_TOO_LONG", f"{len(ids)} prompt tokens are too many", field="messages"
            )
        return PrepareResponse(token_ids=encode_tokens(ids), media=media)


@dataclass
class Played:
    """What became of one request."""

    spec: RequestSpec
    cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SchedulerPlayer:
    """Owns every request of a model and answers it with `answer(spec)`: groups of tokens, one group
    a step.
    """

    def __init__(self, redis_url: str, model_name: str, table: TokenBytes) -> None:
        self._redis = connect(redis_url)
        self._keys = Keys(model_name)
        self._table = table
        self._stack = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self.queue = Queue(self._redis, self._keys)
        self.id = new_instance_id()
        self.played: dict[str, Played] = {}
        self.answer: Callable[[RequestSpec], Iterable[Sequence[int]]] = lambda spec: [[0]]
        self.failure: Failure | None = None
        self.load = GetLoadResponse(
            decoders=[DecoderLoad(running=3, waiting=1, blocks_used=25, blocks_total=100)]
        )
        # Waited for before each step of each request.
        self.step: Callable[[str, int], Awaitable[None]] = _at_once
        self.taking = True

    async def __aenter__(self) -> Self:
        await self.queue.renew(self.id, self.load, register=True, tokens_per_s=None)
        await self._stack.enter_async_context(
            Announcement(self._redis, self._keys, "decoder", new_instance_id(), "unix:/none")
        )
        self._start(self._renew())
        self._start(self._take())
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end(*self._tasks)
        await self._stack.aclose()
        await self._redis.aclose()

    async def taken(self, request_id: str = "") -> Played:
        """Waits until a request has been taken: that one, or any."""
        async with asyncio.timeout(10):
            while True:
                for name, played in self.played.items():
                    if request_id in ("", name):
                        return played
                await asyncio.sleep(0.01)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(0.4)
            await self.queue.renew(self.id, self.load, register=False, tokens_per_s=None)

    async def _take(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            if not self.taking:
                continue
            for request in (
                await self.queue.take(self.id, max_requests=64, max_tokens=1 << 20) or []
            ):
                self.played[request.spec.request_id] = Played(request.spec)
                self._start(self._run(request))

    async def _run(self, request: TakenRequest) -> None:
        spec, rid = request.spec, request.spec.request_id
        played = self.played[rid]
        sampling = spec.sampling
        finder = StopFinder(
            self._table,
            list(sampling.stop),
            skip_special_tokens=spec.reply.skip_special_tokens,
            include_stop=sampling.include_stop_str_in_output,
        )
        done, ending = 0, None
        for index, group in enumerate(self.answer(spec)):
            await self.step(rid, index)
            tokens: list[int] = []
            for token in group:
                tokens.append(token)
                ending = _ending(spec, finder, token, done + len(tokens))
                if ending is not None:
                    break
            if not await self._append(rid, done, tokens, ending):
                played.cancelled = True
                break
            done += len(tokens)
            if ending is not None:
                break
        else:
            ending = Ending(reason=FinishReason.FINISH_REASON_STOP)
            if self.failure is not None:
                ending = Ending(reason=FinishReason.FINISH_REASON_ERROR, failure=self.failure)
            await self._append(rid, done, [], ending)
        played.ended.set()

    async def _append(
        self, rid: str, start: int, tokens: Sequence[int], ending: Ending | None
    ) -> bool:
        append = Append(rid, 0, start, 4, encode_tokens(tokens), ending)
        (answer,) = await self.queue.append(self.id, [append])
        if answer.code == AppendCode.CANCEL and ending is None:
            ending = Ending(reason=FinishReason.FINISH_REASON_CANCELLED)
            end = Append(rid, 0, start + len(tokens), 4, b"", ending)
            await self.queue.append(self.id, [end])
        return answer.code == AppendCode.OK


async def _at_once(request_id: str, index: int) -> None:
    pass


def _ending(spec: RequestSpec, finder: StopFinder, token: int, count: int) -> Ending | None:
    match = finder.push(token)
    if match is not None:
        return Ending(reason=FinishReason.FINISH_REASON_STOP, stop=match.stop, cut=match.cut_bytes)
    if token in spec.sampling.stop_token_ids:
        return Ending(reason=FinishReason.FINISH_REASON_STOP, stop_token_id=token)
    if count >= spec.sampling.max_tokens:
        return Ending(reason=FinishReason.FINISH_REASON_LENGTH)
    return None
