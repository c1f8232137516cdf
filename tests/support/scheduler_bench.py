"""A scheduler process's surroundings for tests: a real Redis, a queue to put requests in, and decoders.

The played decoder speaks the real step stream and computes by arithmetic, so that every token can be predicted; the
real one runs a checkpoint.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from services.scheduler.server import serve
from services.scheduler.settings import SchedulerSettings
from shared.errors import Superseded, Unavailable
from shared.net.registry import Announcement
from shared.net.rpc.server import RpcServer
from shared.queue import Queue, connect, token_log
from shared.queue.keys import Keys, new_instance_id, new_request_id
from shared.queue.log_event import PROMPT
from tessera.common.v1 import ending_pb2
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1 import decoder_pb2
from tessera.decoder.v1.decoder_pb2_grpc import (
    DecoderServiceServicer,
    add_DecoderServiceServicer_to_server,
)
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, RequestSpec
from tests.support.step_stream import DECODER_ID, running_decoder

MODEL = "arithmetic"


def next_token(tokens: list[int], choice: int = 0) -> int:
    """A model: the next token is a function of all before it, and of the choice."""
    return (sum(tokens) * 31 + len(tokens) + 11 * choice) % 97 + 5


def generate(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """What a request must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


def logprob_of(token: int, rank: int) -> float:
    """What the played decoder says of a token."""
    return -0.125 * rank - token / 1024


def ints(data: bytes) -> list[int]:
    """int32, little-endian."""
    values: list[int] = np.frombuffer(data, "<i4").tolist()
    return values


class PlayedDecoder(DecoderServiceServicer):
    """Keeps token histories and answers plans; `delay_s` is the length of a step."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.id = new_instance_id()
        self.delay_s = delay_s
        self.largest_lease = 0
        self.slots: dict[int, list[int]] = {}
        self.choices: dict[int, int] = {}
        self.logprobs: dict[int, int] = {}
        self.scored: dict[int, tuple[int, list[int]]] = {}  # k and the prompt, where that was asked
        self.stalled = asyncio.Event()
        self.draining = False
        self.plans_since_draining = 0  # that came after a heartbeat which said so had left
        self.num_computed = 0  # tokens that rows were made of
        self.met: set[str] = set()  # requests that were ever introduced

    async def Steps(self, requests: Any, context: Any) -> AsyncIterator[decoder_pb2.StepsResponse]:
        first = await anext(aiter(requests))
        assert first.open.decoder_id == self.id
        assert first.open.lease > self.largest_lease
        if self.draining:
            raise Unavailable("DECODER_STOPS", "it was told to stop")
        self.largest_lease = first.open.lease
        self.slots.clear()
        said_draining = False
        yield decoder_pb2.StepsResponse(
            hello=decoder_pb2.Hello(
                decoder_id=self.id,
                model_fingerprint=b"f" * 16,
                block_size=4,
                num_blocks=200,
                max_slots=16,
                max_model_len=256,
                max_batched_tokens=64,
                plans_in_flight=2,
            )
        )
        async for request in requests:
            if request.WhichOneof("message") == "heartbeat":
                said_draining = self.draining
                yield decoder_pb2.StepsResponse(
                    heartbeat=decoder_pb2.Heartbeat(draining=said_draining)
                )
                continue
            self.plans_since_draining += said_draining
            if self.stalled.is_set():
                await asyncio.sleep(3600)
            await asyncio.sleep(self.delay_s)
            if first.open.lease < self.largest_lease:
                # As the real one: a plan of an older lease changes nothing any more.
                raise Superseded("NEWER_LEASE", f"lease {self.largest_lease} took over")
            yield decoder_pb2.StepsResponse(result=self.step(request.plan))

    def step(self, plan: decoder_pb2.StepPlan) -> decoder_pb2.StepResult:
        """The answer to a plan."""
        self._introduce(plan)
        self.num_computed += sum(ints(plan.row_count))
        result = decoder_pb2.StepResult(lease=plan.lease, step=plan.step)
        rows = zip(ints(plan.row_slot), ints(plan.row_start), ints(plan.row_count), strict=True)
        for row, (slot, start, count) in enumerate(rows):
            if slot in self.scored:
                k, prompt = self.scored[slot]
                some = range(max(start, 1), min(start + count, len(prompt)))
                result.prompt_logprobs.add(
                    row=row,
                    logprobs=floats([logprob_of(prompt[i], 0) for i in some]),
                    top_ids=token_log.encode_tokens([i + r for i in some for r in range(k)]),
                    top_logprobs=floats([logprob_of(i, r) for i in some for r in range(k)]),
                )
        tokens, own, top_ids, top = [], [], [], []
        for slot in ints(plan.sample_slot):
            token = next_token(self.slots[slot], self.choices[slot])
            tokens.append(token)
            self.slots[slot].append(token)
            wanted = self.logprobs.get(slot)
            own.append(logprob_of(token, 0) if wanted is not None else float("nan"))
            top_ids += [token + r for r in range(wanted or 0)]
            top += [logprob_of(token, r) for r in range(wanted or 0)]
        result.tokens = token_log.encode_tokens(tokens)
        if any(value == value for value in own):
            result.logprobs, result.top_logprobs = floats(own), floats(top)
            result.top_ids = token_log.encode_tokens(top_ids)
        return result

    def _introduce(self, plan: decoder_pb2.StepPlan) -> None:
        for slot in ints(plan.drop):
            del self.slots[slot]
            self.logprobs.pop(slot, None)
            self.scored.pop(slot, None)
        for new in plan.new:
            self.met.add(new.request_id)
            self.slots[new.slot] = ints(new.tokens)
            self.choices[new.slot] = new.choice
            if new.sampling.HasField("logprobs"):
                self.logprobs[new.slot] = new.sampling.logprobs
            if new.sampling.HasField("prompt_logprobs"):
                prompt = ints(new.tokens)[: new.prompt_len]
                self.scored[new.slot] = (new.sampling.prompt_logprobs, prompt)
        forks = (plan.fork_child, plan.fork_parent, plan.fork_choice)
        for child, parent, choice in zip(*map(ints, forks), strict=True):
            self.slots[child] = list(self.slots[parent])
            self.choices[child] = choice
            if parent in self.logprobs:
                self.logprobs[child] = self.logprobs[parent]


def floats(values: list[float]) -> bytes:
    """float32, little-endian."""
    return np.asarray(values, "<f4").tobytes()


class Bench:
    """Redis, a queue to put requests in, and starters for schedulers and decoders."""

    def __init__(self, stack: contextlib.AsyncExitStack, url: str, model: Path) -> None:
        self.stack = stack
        self.url = url
        self.model = model
        self.keys = Keys(MODEL)
        self.redis = connect(url)
        self.queue = Queue(self.redis, self.keys)

    async def decoder(
        self, delay_s: float = 0.0
    ) -> tuple[PlayedDecoder, contextlib.AsyncExitStack]:
        played = PlayedDecoder(delay_s)
        stack = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", grace_s=0))
        server.add(
            "tessera.decoder.v1.DecoderService", add_DecoderServiceServicer_to_server, played
        )
        await server.ready()
        await stack.enter_async_context(
            Announcement(self.redis, self.keys, "decoder", played.id, server.address)
        )
        return played, stack

    async def real_decoder(self, folder: Path, listen: Path, **settings: Any) -> Any:
        """A decoder that runs a checkpoint; what `running_decoder` gives."""
        running = await self.stack.enter_async_context(
            running_decoder(folder, listen, max_num_seqs=24, **settings)
        )
        await self.stack.enter_async_context(
            Announcement(self.redis, self.keys, "decoder", DECODER_ID, running.address)
        )
        return running

    def scheduler(
        self, listen: str = "127.0.0.1:0", **more: Any
    ) -> tuple[asyncio.Event, asyncio.Task[int]]:
        """Starts one; what stops it, and its task."""
        stop = asyncio.Event()
        settings = SchedulerSettings(
            model=self.model, served_model_name=MODEL, redis_url=self.url, listen=listen, **more
        )
        task = asyncio.create_task(serve(settings, stop))

        async def end() -> None:
            stop.set()
            await asyncio.wait([task], timeout=10)

        self.stack.push_async_callback(end)
        return stop, task

    async def registered(self, count: int) -> list[str]:
        """Waits until so many schedulers hold a lease; their names."""
        async with asyncio.timeout(30):
            while True:
                found: Any = await self.redis.zrange(f"{self.keys.prefix}:scheds", 0, -1)
                if len(found) == count:
                    return [str(sid, "ascii") for sid in found]
                await asyncio.sleep(0.01)

    async def ask(
        self, prompt: list[int], more: dict[str, Any] | None = None, **sampling: Any
    ) -> str:
        """Puts a request in the queue; `more` are fields of its spec."""
        rid = new_request_id(self.keys.tag)
        options = {"n": 1, "max_tokens": 10, "repetition_penalty": 1.0, "top_p": 1.0, **sampling}
        options.setdefault("best_of", options["n"])
        spec = RequestSpec(
            request_id=rid,
            model=MODEL,
            prompt=token_log.encode_tokens(prompt),
            sampling=SamplingParams(**options),
            reply=ReplyFormat(skip_special_tokens=True),
            **(more or {}),
        )
        # Nobody says here that it is followed: it lives for as long as a test may take.
        await self.queue.admit(spec, cost=len(prompt) + options["max_tokens"], follow_ms=3_600_000)
        return rid

    async def answers(
        self, rid: str, n: int, stride: int = 4, timeout_s: float = 60
    ) -> list[tuple[bytes, ending_pb2.Ending]]:
        """Records and ending of each choice, when all have ended."""
        async with asyncio.timeout(timeout_s):
            while True:
                found = await self.queue.read(rid, n, stride=stride)
                assert found is not None
                endings = [e for e in found.endings if e is not None]
                if len(endings) == n:
                    return list(zip(found.records, endings, strict=True))
                await asyncio.sleep(0.01)

    async def prompt_log(self, rid: str) -> bytes:
        """The log-probabilities of the prompt."""
        found: Any = await self.redis.get(self.keys.log(rid, PROMPT))
        return bytes(found or b"")

    async def answer(self, rid: str, timeout_s: float = 60) -> tuple[list[int], ending_pb2.Ending]:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await self.queue.read(rid, 1)
                assert found is not None
                if found.endings[0] is not None:
                    return token_log.decode_tokens(found.records[0]), found.endings[0]
                await asyncio.sleep(0.01)
