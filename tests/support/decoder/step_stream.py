"""A naive scheduler's end of the step stream, for tests of the decoder."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.decoder.loading.load import Loaded, load
from services.decoder.server import collecting_thread, hello
from services.decoder.servicer import DecoderServicer
from services.decoder.settings import DecoderSettings
from services.decoder.worker.executor import Executor
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.net.rpc.server import RpcServer
from tessera.common.v1.media_pb2 import MediaItem
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1 import decoder_pb2_grpc
from tessera.decoder.v1.decoder_pb2 import (
    Heartbeat,
    Hello,
    NewSequence,
    Open,
    StepPlan,
    StepResult,
    StepsRequest,
    StepsResponse,
)

DECODER_ID = "decoder-under-test"


def ints(values: Iterable[int]) -> bytes:
    """int32, little-endian."""
    return np.asarray(list(values), "<i4").tobytes()


def read_ints(data: bytes) -> list[int]:
    """The reverse of `ints`."""
    return [int(i) for i in np.frombuffer(data, "<i4")]


def read_floats(data: bytes) -> list[float]:
    """float32, little-endian."""
    return [float(f) for f in np.frombuffer(data, "<f4")]


def greedy(**changes: Any) -> SamplingParams:
    """Settings as the gateway would resolve them."""
    values = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 16, "n": 1}
    return SamplingParams(**{**values, **changes})


def make_plan(**fields: Any) -> StepPlan:
    """A plan whose arrays are given as lists of numbers."""
    arrays: dict[str, Any] = {
        name: ints(value) if isinstance(value, list) and _is_numbers(name) else value
        for name, value in fields.items()
    }
    return StepPlan(**arrays)


def _is_numbers(name: str) -> bool:
    return name not in (
        *("new", "fetch", "release", "sealed_hashes", "load_adapters", "unload_adapters"),
    )


@asynccontextmanager
async def running_decoder(
    folder: Path,
    listen: Path,
    load: Any = load,
    name: Any = DECODER_ID,
    **settings: Any,
) -> AsyncIterator["Decoder"]:
    """A real decoder server in this process, on a unix socket at `listen`, of what `load` returns. `name` is its id.
    Without graphs unless asked for: their speed, which `auto` goes by, says nothing here."""
    defaults = {
        "device": "cpu",
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 8 << 20,
        "threads": 1,
        "graphs": "off",
    }
    chosen = DecoderSettings.model_validate({"model": folder, **defaults, **settings})
    executor = Executor()
    loaded = await executor.run(lambda: load(chosen))
    collector = collecting_thread(loaded.device)
    servicer = DecoderServicer(hello(name, loaded), loaded.worker, executor, collector)
    async with RpcServer(f"unix:{listen}", grace_s=0.1) as server:
        server.add(
            "tessera.decoder.v1.DecoderService",
            decoder_pb2_grpc.add_DecoderServiceServicer_to_server,
            servicer,
        )
        await server.ready()
        yield Decoder(server.address, loaded, servicer)
    await loaded.worker.embeddings.close()
    await executor.run(loaded.close)
    executor.stop()
    if collector is not None:
        collector.stop()


@dataclass
class Decoder:
    """The parts of a running decoder that tests use."""

    address: str
    loaded: Loaded
    servicer: DecoderServicer


class StepStream:
    """One open stream, which fills in the lease and step of plans."""

    def __init__(self, call: Any, hello: Hello, lease: int) -> None:
        self.call = call
        self.hello = hello
        self.lease = lease
        self.draining = False
        self.ready: list[bytes] = []  # artifacts reported so far, in results of any kind
        self.lost: list[bytes] = []
        self.beating: asyncio.Task[None]  # the heartbeats; a test cancels it to be silent
        self._step = 0
        self._writing = asyncio.Lock()  # a call takes one message at a time

    @classmethod
    @asynccontextmanager
    async def open(
        cls, address: str, lease: int = 1, decoder_id: str = DECODER_ID
    ) -> AsyncIterator["StepStream"]:
        """Raises the decoder's refusal."""
        async with open_channel(address) as connection:
            call = decoder_pb2_grpc.DecoderServiceStub(connection).Steps()
            opening = Open(decoder_id=decoder_id, scheduler_id="test", lease=lease)
            with calling("decoder"):
                await call.write(StepsRequest(open=opening))
                first = await _read(call)
            stream = cls(call, first.hello, lease)
            stream.beating = asyncio.create_task(stream._beat())
            try:
                yield stream
            finally:
                stream.beating.cancel()
                await asyncio.gather(stream.beating, return_exceptions=True)
                call.cancel()

    async def send(self, plan: StepPlan) -> None:
        """Sends without waiting for the result."""
        self._step += 1
        plan.lease = plan.lease or self.lease  # what a test has set stays
        plan.step = plan.step or self._step
        await self._write(StepsRequest(plan=plan))

    async def result(self) -> StepResult:
        """The next result that answers a plan. Raises what the stream ended with."""
        while not (result := await self.next_message()).step:
            pass
        return result

    async def next_message(self) -> StepResult:
        """The next result, or one of step 0 about artifacts alone; heartbeats are skipped."""
        with calling("decoder"):
            while True:
                response = await _read(self.call)
                if response.WhichOneof("message") == "result":
                    self.ready += response.result.artifacts_ready
                    self.lost += response.result.artifacts_lost
                    return response.result
                self.draining = self.draining or response.heartbeat.draining

    async def run(self, plan: StepPlan) -> StepResult:
        """Sends and waits."""
        await self.send(plan)
        return await self.result()

    async def _write(self, request: StepsRequest) -> None:
        async with self._writing:
            await self.call.write(request)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._write(StepsRequest(heartbeat=Heartbeat()))


async def _read(call: Any) -> StepsResponse:
    response = await call.read()
    if isinstance(response, StepsResponse):
        return response
    raise AssertionError(f"the stream ended with {await call.code()}")


@dataclass
class Text:
    """One sequence of the naive scheduler."""

    slot: int
    prompt: Sequence[int]
    sampling: SamplingParams
    choice: int = 0
    media: Sequence[MediaItem] = ()
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: bool = False
    logprobs: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]


class NaiveScheduler:
    """Gives out blocks and never takes them back; runs everything it has in every step."""

    def __init__(self, stream: StepStream) -> None:
        self.stream = stream
        self.free = list(range(stream.hello.num_blocks - 1, 0, -1))

    def grow(self, text: Text, tokens: int, plan: dict[str, list[int]]) -> None:
        """Adds the table edit that gives a text blocks for so many tokens."""
        missing = -(-tokens // self.stream.hello.block_size) - len(text.blocks)
        if missing <= 0:
            return
        new = [self.free.pop() for _ in range(missing)]
        plan["edit_slot"].append(text.slot)
        plan["edit_index"].append(len(text.blocks))
        plan["edit_len"].append(missing)
        plan["edit_blocks"] += new
        text.blocks += new

    async def step(self, texts: Sequence[Text], chunk: int) -> StepResult:
        """One step of all texts, each with at most `chunk` tokens."""
        plan = empty_plan()
        sampled = []
        new = []
        for text in texts:
            if not text.known:
                new.append(introduce(text))
                text.known = True
            count = min(chunk, len(text.tokens) - text.computed)
            self.grow(text, text.computed + count, plan)
            if text.computed + count == len(text.tokens):
                plan["sample_row"].append(len(plan["row_slot"]))
                plan["sample_slot"].append(text.slot)
                sampled.append(text)
            plan["row_slot"].append(text.slot)
            plan["row_start"].append(text.computed)
            plan["row_count"].append(count)
            text.computed += count
        result = await self.stream.run(make_plan(new=new, **plan))
        for text, token in zip(sampled, read_ints(result.tokens), strict=True):
            text.output.append(token)
        return result

    async def generate(self, texts: Sequence[Text], count: int, chunk: int = 64) -> None:
        """Runs until each text has `count` tokens of output."""
        while left := [text for text in texts if len(text.output) < count]:
            result = await self.step(left, chunk)
            assert not result.failed, result.failed


def empty_plan() -> dict[str, list[int]]:
    """The lists that a plan is made of."""
    names = ("edit_slot", "edit_index", "edit_len", "edit_blocks", "row_slot", "row_start")
    return {name: [] for name in (*names, "row_count", "sample_row", "sample_slot")}


def introduce(text: Text, **changes: Any) -> NewSequence:
    """The message that makes a text known."""
    values = {
        "slot": text.slot,
        "request_id": f"r{text.slot}",
        "choice": text.choice,
        "prompt_len": len(text.prompt),
        "tokens": ints(text.tokens),
        "media": text.media,
        "sampling": text.sampling,
    }
    return NewSequence(**{**values, **changes})
