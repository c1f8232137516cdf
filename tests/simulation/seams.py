"""Where production code reaches outside, and what it finds there in a simulation: clocks, randomness, gRPC's transport,
the Redis client, the HTTP socket, and the decoder's model and compute thread. Nothing else is replaced.
"""

import asyncio
import contextlib
import functools
import gc
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc.aio
import redis.asyncio
import structlog

import services.decoder.server
import services.gateway.gateway
import services.scheduler.decoders.link
import services.scheduler.server
import shared.service_process
from services.decoder.loading.profile_run import Profile
from services.decoder.models.needs import AttentionKind
from services.gateway.admission.model import ServedModel
from services.scheduler.decoders.fleet import Fleet
from services.scheduler.decoders.link import DecoderLink
from services.scheduler.dispatcher import Dispatcher
from services.scheduler.output.output_tracker import OutputTracker
from tests.simulation.arithmetic import MODEL, VirtualExecutor
from tests.simulation.redis_room import SimulatedRedis
from tests.simulation.rpc import SimulatedChannel, SimulatedServer
from tests.support.tokenizers import byte_level_tokenizer

MAX_MODEL_LEN = 120
_MONOTONIC = time.monotonic


@functools.cache
def model_folder() -> Path:
    """A checkpoint folder with a tokenizer and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="ts-sim-"))
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": MAX_MODEL_LEN,
        "vocab_size": MODEL.vocabulary,
        "eos_token_id": MODEL.stop_token,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


class _NoHttp:
    """The REST door is not simulated; clients come by gRPC."""

    port = 1

    def __init__(self, *_: Any) -> None:
        """Binds nothing."""

    def start(self, app: Any) -> None:
        """Answers nothing."""

    async def served(self) -> None:
        """It never ends by itself."""
        await asyncio.Event().wait()

    def unbind(self) -> None:
        """Nothing is bound."""

    async def stop(self) -> None:
        """Nothing runs."""


_load_model = functools.cache(ServedModel.load)
_read_table = functools.cache(services.scheduler.server._read_table)


def pieces() -> list[bytes]:
    """What each token adds to the text."""
    return _read_table(model_folder() / "tokenizer.json").shown_pieces


@contextlib.contextmanager
def seams(world: Any) -> Iterator[None]:
    """Inside, production code lives in `world`: its loop, network, rng and Redis."""
    loop, rng, network = world.loop, world.secrets, world.network
    with contextlib.ExitStack() as stack:

        def patch(where: Any, name: str, what: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, what))

        patch(time, "monotonic", loop.time)
        for kind in (
            Dispatcher,
            DecoderLink,
            Fleet,
            OutputTracker,
        ):  # they took their clock when they were read
            _set_clock(patch, kind.__init__, loop.time)
        patch(time, "perf_counter", loop.time)
        patch(time, "perf_counter_ns", lambda: int(loop.now * 1e9))
        patch(time, "time", lambda: 1_800_000_000.0 + loop.now)
        patch(secrets, "token_hex", lambda n=32: rng.randbytes(n).hex())
        patch(secrets, "token_bytes", lambda n=32: rng.randbytes(n))
        patch(secrets, "randbits", rng.getrandbits)
        patch(grpc.aio, "insecure_channel", lambda a, **_: SimulatedChannel(network, a))
        patch(
            grpc.aio, "server", lambda interceptors=(), **_: SimulatedServer(network, interceptors)
        )
        patch(redis.asyncio.Redis, "from_url", lambda *_, **__: SimulatedRedis(network))
        patch(services.gateway.gateway, "HttpServer", _NoHttp)
        patch(ServedModel, "load", _load_model)
        patch(services.scheduler.server, "_read_table", _read_table)
        patch(services.scheduler.decoders.link, "Scheduler", world.core_class)
        patch(services.decoder.server, "Executor", lambda: _executor(loop, world))
        patch(services.decoder.server, "load", lambda settings: world.load_decoder())
        patch(shared.service_process, "settle", lambda: None)
        patch(sys, "setswitchinterval", lambda _: None)
        stack.enter_context(_logging_to(world))
        stack.enter_context(_without_garbage_collection())
        yield


def _set_clock(patch: Any, function: Any, clock: Any) -> None:
    by_place, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    patch(function, "__defaults__", tuple(clock if d is _MONOTONIC else d for d in by_place))
    named = {name: clock if d is _MONOTONIC else d for name, d in by_name.items()}
    patch(function, "__kwdefaults__", named)


def _executor(loop: asyncio.AbstractEventLoop, world: Any) -> VirtualExecutor:
    executor = VirtualExecutor(loop)
    world.executors[world.process()] = executor
    return executor


def loaded(worker: Any, step_us: float, token_us: float) -> Any:
    """What `services.decoder.loading.load.load` returns."""
    return SimpleNamespace(
        worker=worker,
        fingerprint=b"arithmetic-model",
        row_invariant=True,
        profile=Profile(step_bytes=0, step_us=step_us, token_us=token_us),
        attention=AttentionKind.CAUSAL,
    )


@contextlib.contextmanager
def _logging_to(world: Any) -> Iterator[None]:
    def keep(logger: Any, method: str, event: dict[str, Any]) -> Any:
        world.note_log(method, event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """When cycles are found depends on what ran before in this interpreter."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
