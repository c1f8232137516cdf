"""A scheduler process's surroundings for tests: a real Redis, a queue to put requests in, and decoders.

The arithmetic decoder speaks the real step stream, and every token can be predicted; the real one runs a checkpoint.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from services.scheduler.requests.output_tracker import KEPT_S
from services.scheduler.server import serve
from services.scheduler.settings import SchedulerSettings
from shared.net.rpc.server import RpcServer
from shared.queue import Queue, connect, token_log
from shared.queue.keys import Keys, new_request_id
from shared.queue.log_event import PROMPT
from shared.queue.registry import Announcement
from tessera.common.v1 import ending_pb2
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2_grpc import add_DecoderServiceServicer_to_server
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, RequestSpec
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.decoder.step_stream import DECODER_ID, running_decoder

MODEL = "arithmetic"


class Bench:
    """Redis, a queue to put requests in, and starters for schedulers and decoders."""

    def __init__(self, stack: contextlib.AsyncExitStack, url: str, model: Path) -> None:
        self.stack = stack
        self.url = url
        self.model = model
        self.keys = Keys(MODEL)
        self.redis = connect(url)
        self.queue = Queue(self.redis, self.keys)
        self.decoders: list[ArithmeticDecoder] = []

    async def decoder(
        self,
        delay_s: float = 0.0,
        *,
        of: type[ArithmeticDecoder] = ArithmeticDecoder,
        content: bytes = b"",
        numerics: str = "",
    ) -> tuple[ArithmeticDecoder, contextlib.AsyncExitStack]:
        """A running one with weights of this content and these numerics, and what ends it."""
        arithmetic = of(delay_s, content, numerics)
        self.decoders.append(arithmetic)
        stack = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", grace_s=0))
        server.add(
            "tessera.decoder.v1.DecoderService", add_DecoderServiceServicer_to_server, arithmetic
        )
        await server.ready()
        name, address = arithmetic.id, server.address
        await stack.enter_async_context(
            Announcement(self.redis, self.keys, "decoder", name, address, content=content)
        )
        return arithmetic, stack

    async def real_decoder(
        self,
        folder: Path,
        listen: Path,
        *,
        name: str = DECODER_ID,
        stack: contextlib.AsyncExitStack | None = None,
        **settings: Any,
    ) -> Any:
        """A decoder that runs a checkpoint until `stack`, if given, is closed; what `running_decoder` gives."""
        stack = stack or self.stack
        running = await stack.enter_async_context(
            running_decoder(folder, listen, name=name, max_num_seqs=24, **settings)
        )
        content = running.loaded.content
        await stack.enter_async_context(
            Announcement(self.redis, self.keys, "decoder", name, running.address, content=content)
        )
        return running

    def scheduler(
        self, listen: str = "127.0.0.1:0", kept_s: float = KEPT_S, **more: Any
    ) -> tuple[asyncio.Event, asyncio.Task[int]]:
        """Starts one; what stops it, and its task."""
        stop = asyncio.Event()
        settings = SchedulerSettings(
            model=self.model, served_model_name=MODEL, redis_url=self.url, listen=listen, **more
        )
        task = asyncio.create_task(serve(settings, stop, kept_s=kept_s))

        async def end() -> None:
            stop.set()
            await asyncio.wait([task], timeout=60)

        self.stack.push_async_callback(end)
        return stop, task

    async def registered(self, count: int) -> list[str]:
        """Waits until so many schedulers hold a lease; their names."""
        async with asyncio.timeout(60):
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
