"""Stand-ins for the services that the gateway calls, with their real contracts.

`PreprocessPlayer` is a PreprocessService on a real gRPC server with a real tokenizer;
`SchedulerPlayer` takes requests from the real queue and appends what the test tells it to, ending
them by the rules of the real scheduler.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from shared.errors import InvalidRequest, ServingError, Unavailable
from shared.net import tasks
from shared.net.rpc.server import RpcServer
from shared.queue import Append, AppendCode, Places, Queue, TakenRequest, connect
from shared.queue.adapters import AdapterRegistry, RegisteredAdapters
from shared.queue.keys import Keys, new_instance_id
from shared.queue.log_event import Origin
from shared.queue.registry import Announcement
from shared.queue.token_log import (
    decode_tokens,
    encode_pooled,
    encode_tokens,
    stride,
)
from shared.served_part import ServedPart
from shared.text.stop_search import StopStrings
from shared.text.text_fold import StopFinder, TokenBytes
from tessera.common.v1.ending_pb2 import Ending, Failure, FinishReason
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1 import preprocess_pb2_grpc
from tessera.preprocess.v1.preprocess_pb2 import (
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
    PrepareResponse,
    PrepareResult,
)
from tessera.scheduler.v1.queue_pb2 import LogBatch, LogEvent, RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import (
    DecoderLoad,
    DraftTotals,
    Durations,
    GetLoadResponse,
    TokenCounts,
)
from tests.support.queue.records import logprob_record
from tests.support.tokenizers import token_id

IMAGE_TOKENS = 4
_MAX_MESSAGE_BYTES = 64 << 20
FIRST_DECODER, SECOND_DECODER = "decoder-1st", "decoder-2nd"


class PreprocessPlayer(preprocess_pb2_grpc.PreprocessServiceServicer):
    """Renders `role: text` lines, IMAGE_TOKENS placeholders for each picture; of the text it tells the end. Announces
    itself in the registry.
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
        server = await self._stack.enter_async_context(
            RpcServer("127.0.0.1:0", grace_s=0.1, max_message_bytes=_MAX_MESSAGE_BYTES)
        )
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
            Announcement(
                redis,
                self._keys,
                "preprocess",
                new_instance_id(),
                server.address,
                ServedPart("native").to_json(),
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def GetPixels(self, request: Any, context: Any) -> Any:
        """Of the contract; the gateway never calls it."""
        raise NotImplementedError

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareResponse:
        """The contract's method."""
        self.seen.append(request)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        kind = request.WhichOneof("input")
        media: list[MediaItem] = []
        ids: list[int] = []
        shown = ""
        if kind == "token_ids":
            ids = decode_tokens(request.token_ids)
        elif kind == "text":
            ids = self._tokenizer.encode(request.text).ids
            ids += self._tokenizer.encode(request.text_pair).ids
        else:
            for message in request.conversation.messages:
                ids += self._tokenizer.encode(f"{message.role}: ").ids
                for part in message.content:
                    if part.WhichOneof("part") == "text":
                        shown = part.text
                        ids += self._tokenizer.encode(part.text).ids
                        continue
                    media.append(_picture(len(ids)))
                    ids += [token_id(self._tokenizer, "<image>")] * IMAGE_TOKENS
        if request.max_prompt_tokens and len(ids) > request.max_prompt_tokens:
            raise InvalidRequest(
                "PROMPT_TOO_LONG", f"{len(ids)} prompt tokens are too many", field="messages"
            )
        return PrepareResponse(
            token_ids=encode_tokens(ids),
            media=media,
            cached_media=min(1, len(media)),
            text=shown,
        )

    async def PrepareMany(
        self, requests: AsyncIterator[PrepareManyRequest], context: Any
    ) -> AsyncIterator[PrepareManyResponse]:
        """The contract's other method."""
        async for request in requests:
            yield PrepareManyResponse(
                results=[await self._result(prompt, context) for prompt in request.prompts]
            )

    async def _result(self, prompt: PrepareRequest, context: Any) -> PrepareResult:
        try:
            return PrepareResult(prepared=await self.Prepare(prompt, context))
        except ServingError as error:
            return PrepareResult(failure=error.to_failure())


def _picture(offset: int) -> MediaItem:
    return MediaItem(digest=b"d" * 16, offset=offset, length=IMAGE_TOKENS, rows=IMAGE_TOKENS)


@dataclass
class Played:
    """What became of one request."""

    spec: RequestSpec
    cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def score(token: int, place: int, k: int) -> tuple[list[int], list[float]]:
    """Log-probabilities of the player's model at a place: its own id and the top ones, with their
    log-probabilities. Every third token is not the likeliest.
    """
    others = [(token + 1 + i) % 300 for i in range(k)]
    own = -0.125 * (place % 3) - 0.0625
    top = [(token, own)] + [(other, -1.0 - i) for i, other in enumerate(others)]
    if place % 3 == 2:
        own, top = -9.5, top[1:]
    return [token, *(i for i, _ in top[:k])], [own, *(p for _, p in top[:k])]


class SchedulerPlayer:
    """Owns every request of a model and answers each choice with `answer(spec)`, or with
    `answer_choice(spec, choice)` where that is set: groups of tokens, one group a step.
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
        # "interactive" or "batch", in the order in which they were taken.
        self.classes: list[str] = []
        self.answer: Callable[[RequestSpec], Iterable[Sequence[int]]] = lambda spec: [[0]]
        self.answer_choice: Callable[[RequestSpec, int], Iterable[Sequence[int]]] | None = None
        # What a pooled prompt becomes: as many numbers as it asks for.
        self.vector: Callable[[RequestSpec], Sequence[float]] = lambda spec: (
            [1.0] * spec.pooling.width
        )
        # Why its decoder reads no adapter; empty reads all. Whether it says anything of them.
        self.cannot_read = ""
        self.reads_adapters = True
        self._decoder_id = new_instance_id()
        self.failure: Failure | None = None
        # The choices that `failure` is for; all if None.
        self.failing: set[int] | None = None
        # Seconds in the queue, as endings say; None says nothing.
        self.queued_s: float | None = None
        self.origin = Origin()  # of all records
        # Told with every ending.
        self.cached_tokens = self.preemptions = 0
        self.load = GetLoadResponse(
            decoders=[
                DecoderLoad(
                    decoder_id=FIRST_DECODER,
                    block_size=16,
                    host_blocks=7,
                    prefix_queries=10,
                    prefix_hits=4,
                    step_tokens=TokenCounts(bounds=[1, 8], counts=[5, 3, 1], total=60),
                    running=3,
                    waiting=1,
                    blocks_used=25,
                    blocks_total=100,
                    steps=9,
                    step_target_us=250_000,
                    step_predicted_us=125_000,
                    prompt_budget=48,
                    drafts=DraftTotals(rows=6, tokens=15, accepted=[5, 3, 0]),
                    read_steps=Durations(bounds_s=[0.1, 0.25], counts=[4, 2, 1], total_s=1.5),
                ),
                DecoderLoad(
                    decoder_id=SECOND_DECODER,
                    block_size=16,
                    prefix_queries=1,
                    steps=3,
                    step_predicted_us=50_000,
                    read_steps=Durations(bounds_s=[0.1, 0.25], counts=[3, 0, 0], total_s=0.25),
                ),
            ]
        )
        # Waited for before each step of each request.
        self.step: Callable[[str, int], Awaitable[None]] = _at_once
        self.taking = True

    async def __aenter__(self) -> Self:
        await self.queue.renew(self.id, self.load, register=True, tokens_per_s=None)
        await self._stack.enter_async_context(
            Announcement(
                self._redis,
                self._keys,
                "decoder",
                self._decoder_id,
                "unix:/none",
                ServedPart("transformers 5", ("prefix reuse",), 2e-6, ranks=2).to_json(),
            )
        )
        self.encoder = await self._stack.enter_async_context(
            Announcement(self._redis, self._keys, "vision_encoder", new_instance_id(), "unix:/none")
        )
        self._start(self._renew())
        self._start(self._read_adapters())
        self._start(self._take())
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end(*self._tasks)
        await self._stack.aclose()
        await self._redis.aclose()

    async def taken(self, request_id: str = "") -> Played:
        """Waits until a request has been taken: that one, or any."""
        async with asyncio.timeout(60):
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
            with contextlib.suppress(Unavailable):
                await self.queue.renew(self.id, self.load, register=False, tokens_per_s=None)

    async def _read_adapters(self) -> None:
        registry = AdapterRegistry(self._redis, self._keys)
        known = RegisteredAdapters()
        while True:
            await asyncio.sleep(0.05)
            with contextlib.suppress(Unavailable):
                found = await registry.read(known.version)
                if found is None:
                    continue
                for name, since in found.since.items():
                    if known.since.get(name) != since and self.reads_adapters:
                        lora_id = found.names[name]
                        await registry.report(lora_id, self._decoder_id, self.cannot_read)
                known = found

    async def _take(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            if not self.taking:
                continue
            found = None
            with contextlib.suppress(Unavailable):
                found = await self.queue.take(self.id, [Places("", 64, 1 << 20)])
            for request in found or []:
                self.played[request.spec.request_id] = Played(request.spec)
                self.classes.append(request.prio)
                self._start(self._run(request))

    async def _run(self, request: TakenRequest) -> None:
        spec, rid = request.spec, request.spec.request_id
        await self._log_prompt(spec)
        if spec.HasField("pooling"):
            await self._pool(spec)
            return
        choices = range(spec.sampling.n)
        await asyncio.gather(*(self._run_choice(spec, choice) for choice in choices))
        self.played[rid].ended.set()

    async def _pool(self, spec: RequestSpec) -> None:
        """The one record of a pooled prompt, with its ending."""
        await self.step(spec.request_id, 0)
        record = encode_pooled(np.asarray(self.vector(spec), "<f4").tobytes())
        ending = Ending(reason=FinishReason.FINISH_REASON_STOP)
        if self.failure is not None:
            record = b""
            ending = Ending(reason=FinishReason.FINISH_REASON_ERROR, failure=self.failure)
        size = stride(None, spec.pooling.width)
        append = Append(spec.request_id, 0, 0, size, record, ending, self.origin)
        (answer,) = await self.queue.append(self.id, [append])
        played = self.played[spec.request_id]
        played.cancelled = answer.code != AppendCode.OK
        played.ended.set()

    async def _log_prompt(self, spec: RequestSpec) -> None:
        """The prompt's log-probabilities, in pieces, before any output."""
        if not spec.sampling.HasField("prompt_logprobs"):
            return
        k, prompt = spec.sampling.prompt_logprobs, decode_tokens(spec.prompt)
        log = self._keys.log(spec.request_id, -1)
        for start in range(0, len(prompt) - 1, 7):
            some = prompt[start + 1 : start + 8]
            records = b"".join(
                logprob_record(token, *score(token, start + i, k)) for i, token in enumerate(some)
            )
            event = LogEvent(request_id=spec.request_id, choice=-1, start=start, records=records)
            await self._redis.append(log, records)
            batch = LogBatch(events=[event]).SerializeToString()
            await self._redis.publish(self._keys.token_channel, batch)
            await self.step(spec.request_id, -1)

    async def _run_choice(self, spec: RequestSpec, choice: int) -> None:
        played = self.played[spec.request_id]
        sampling = spec.sampling
        finder = StopFinder(
            self._table,
            StopStrings(sampling.stop),
            skip_special_tokens=spec.reply.skip_special_tokens,
            include_stop=sampling.include_stop_str_in_output,
        )
        done, ending = 0, None
        groups = self.answer_choice(spec, choice) if self.answer_choice else self.answer(spec)
        for index, group in enumerate(groups):
            await self.step(spec.request_id, index)
            tokens: list[int] = []
            for token in group:
                tokens.append(token)
                ending = _ending(spec, finder, token, done + len(tokens))
                if ending is not None:
                    break
            if not await self._append(spec, choice, done, tokens, ending):
                played.cancelled = True
                return
            done += len(tokens)
            if ending is not None:
                return
        ending = Ending(reason=FinishReason.FINISH_REASON_STOP)
        if self.failure is not None and (self.failing is None or choice in self.failing):
            ending = Ending(reason=FinishReason.FINISH_REASON_ERROR, failure=self.failure)
        await self._append(spec, choice, done, [], ending)

    async def _append(
        self,
        spec: RequestSpec,
        choice: int,
        start: int,
        tokens: Sequence[int],
        ending: Ending | None,
    ) -> bool:
        rid, size = spec.request_id, 4
        if ending is not None and self.queued_s is not None:
            ending.queued_us = round(1e6 * self.queued_s)
        if ending is not None:
            ending.cached_tokens, ending.preemptions = self.cached_tokens, self.preemptions
        records = encode_tokens(tokens)
        if spec.sampling.HasField("logprobs"):
            k = spec.sampling.logprobs
            size = stride(k)
            records = b"".join(
                logprob_record(token, *score(token, start + i, k)) for i, token in enumerate(tokens)
            )
        append = Append(rid, choice, start, size, records, ending, self.origin)
        while True:
            try:
                (answer,) = await self.queue.append(self.id, [append])
                break
            except Unavailable:
                await asyncio.sleep(0.05)
        if answer.code == AppendCode.CANCEL and ending is None:
            ending = Ending(reason=FinishReason.FINISH_REASON_CANCELLED)
            end = Append(rid, choice, start + len(tokens), size, b"", ending)
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
