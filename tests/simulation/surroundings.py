"""Replacements for what production code takes from outside: time, random numbers, connections, the model's folder."""

import contextlib
import contextvars
import functools
import gc
import json
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

import structlog

from shared import environment
from shared.net import internal_token, transport
from shared.text.text_fold import TokenBytes
from tests.simulation.processes.rpc import SimulatedChannel, SimulatedServer
from tests.simulation.redis.server import SimulatedRedis
from tests.support.arithmetic.model import MODEL
from tests.support.tokenizers import byte_level_tokenizer

MAX_MODEL_LEN = 120
_EPOCH_S = 1_800_000_000.0


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


_read_table = functools.cache(TokenBytes.from_tokenizer_json)


def pieces() -> list[bytes]:
    """What each token adds to the text."""
    return _read_table(model_folder() / "tokenizer.json").shown_pieces


def surroundings(world: Any) -> contextvars.Context:
    """A context in which production code uses the time, random numbers, network and Redis of `world`."""
    loop, network = world.loop, world.network
    of_world = environment.Environment(
        monotonic=loop.time,
        unix_time=lambda: _EPOCH_S + loop.now,
        random_bytes=world.secrets.randbytes,
    )
    connections = transport.Transport(
        channel=lambda address, **_: SimulatedChannel(network, address),  # type: ignore[arg-type]
        server=lambda interceptors=(), **_: SimulatedServer(network, interceptors),  # type: ignore[arg-type]
        redis=lambda *_, **__: SimulatedRedis(network),  # type: ignore[arg-type]
        refuses=network.refuses,
    )
    with environment.use(of_world), transport.use(connections):
        return contextvars.copy_context()


@contextlib.contextmanager
def with_internal_token() -> Iterator[None]:
    """The world's services listen where others could reach them, and so ask each other for a token."""
    with tempfile.NamedTemporaryFile("w", prefix="ts-sim-") as file:
        file.write("of the simulation")
        file.flush()
        internal_token.use(Path(file.name))
    try:
        yield
    finally:
        internal_token.use(None)


@contextlib.contextmanager
def logging_to(world: Any) -> Iterator[None]:
    def keep(logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        world.note_log(method, event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """When cycles are found depends on what ran before in this interpreter."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
