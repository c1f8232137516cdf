"""The processes of the world: what each runs, which is production code's own `serve`, and the launcher that starts
again what dies.
"""

import asyncio
import functools
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from services.decoder import server as decoder_server
from services.decoder.settings import DecoderSettings
from services.decoder.steps.needs import AttentionKind, Needs
from services.decoder.worker.plans.plan import Limits
from services.gateway.gateway import run_gateway
from services.gateway.http.server import HttpServer
from services.gateway.settings import GatewaySettings
from services.scheduler import server as scheduler_server
from services.scheduler.settings import SchedulerSettings
from tests.simulation.processes.media_services import ROWS, serve_encoder, serve_preprocess
from tests.simulation.surroundings import MAX_MODEL_LEN, model_folder
from tests.simulation.virtual_loop import Process
from tests.support.arithmetic.model import BLOCK_SIZE, MODEL

if TYPE_CHECKING:
    from tests.simulation.world import World

MODEL_NAME = "arithmetic"
LIMITS = Limits(
    num_blocks=40,
    num_host_blocks=6,
    max_slots=8,
    max_model_len=MAX_MODEL_LEN,
    max_batched_tokens=48,
    max_step_tokens=48,
    block_size=BLOCK_SIZE,
)
assert MODEL.vocabulary < 480  # what the tokenizer has


def limits(needs: Needs, small: int) -> Limits:
    """Of a decoder whose model has these needs; `small` is its step's budget if spans must be whole."""
    others = LIMITS.max_slots - 1
    if needs.whole_prompt:
        most = MAX_MODEL_LEN
        return replace(LIMITS, max_batched_tokens=most, max_step_tokens=most + others)
    if needs.attention is AttentionKind.PREFIX_LM:
        return replace(LIMITS, max_step_tokens=MAX_MODEL_LEN + others)
    if needs.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
        return replace(LIMITS, max_batched_tokens=small, max_step_tokens=max(small, ROWS + others))
    return LIMITS


S = TypeVar("S")
Main = Callable[[asyncio.Event], Awaitable[object]]


class Service:
    """One replica that the launcher keeps running: `process` is the one that runs now."""

    def __init__(self, world: "World", name: str, main: Main) -> None:
        self.world = world
        self.name = name
        self.process: Process | None = None
        self.wanted = True
        self.stop = asyncio.Event()
        self._main = main
        self._born = 0

    @property
    def runs(self) -> bool:
        """Whether its process is alive."""
        return self.process is not None and self.process.alive

    def start(self) -> None:
        """Starts a new process."""
        world = self.world
        process = self.process = Process(self.name)
        self._born += 1
        process.on_death.append(lambda: world.network.close_all(process))
        self.stop = asyncio.Event()
        task = world.loop.spawn(process, self._run(self._main, self.stop))
        task.add_done_callback(lambda _: self._ended(process, task))
        world.trace(f"{self.name} starts")

    @staticmethod
    async def _run(main: Main, stop: asyncio.Event) -> object:
        return await main(stop)

    def kill(self) -> None:
        """kill -9."""
        if self.runs:
            assert self.process is not None
            self.world.loop.kill(self.process)
            self._again(0.2 + 0.8 * self.world.rng.random())

    def _ended(self, process: Process, task: "asyncio.Task[object]") -> None:
        error = None if task.cancelled() else task.exception()
        self.world.trace(f"{self.name} ends: {error or 'in order'}")
        if error is not None:
            lines = "".join(traceback.format_exception(error))
            self.world.broken(f"{self.name} broke down: {lines}")
        self.world.loop.kill(process)
        self._again(0.3)

    def _again(self, seconds: float) -> None:
        if self.wanted:
            self.world.outside(seconds, self._restart)

    def _restart(self) -> None:
        if self.wanted and not self.runs:
            self.start()


def _nothing() -> None:
    """Does nothing: it would concern the whole operating system process."""


class NoHttp(HttpServer):
    """The REST endpoints are not simulated; clients come by gRPC."""

    port = 1

    def __init__(self, *_: Any) -> None:
        """Takes the arguments of the real class and binds nothing."""

    def start(self, app: Any) -> None:
        """Serves nothing."""

    async def served(self) -> None:
        """It never ends by itself."""
        await asyncio.Event().wait()

    def unbind(self) -> None:
        """Nothing is bound."""

    async def stop(self) -> None:
        """Nothing runs."""


@functools.cache
def _settings(kind: Callable[..., S], **values: Any) -> S:
    """Settings take long to read: those of all worlds are the same."""
    return kind(**values)


def scheduler(world: "World", number: int) -> Service:
    """A scheduler."""
    settings = _settings(
        SchedulerSettings,
        model=model_folder(),
        served_model_name=MODEL_NAME,
        listen=f"scheduler-{number}:1",
        changed_model_timeout=5.0,
        first_token_goal=world.first_token_goal_s,
        redis_url="redis://simulated",
    )
    return Service(
        world,
        f"scheduler-{number}",
        lambda stop: scheduler_server.serve(settings, stop, core=world.core_class, settle=_nothing),
    )


def decoder(world: "World", number: int) -> Service:
    """A decoder."""
    settings = _settings(
        DecoderSettings,
        model=model_folder(),
        served_model_name=MODEL_NAME,
        listen=f"decoder-{number}:1",
        redis_url="redis://simulated",
        shutdown_timeout=3.0,
    )
    return Service(
        world,
        f"decoder-{number}",
        lambda stop: decoder_server.serve(
            settings,
            stop,
            load=lambda *_: world.load_decoder(),
            executor=world.executor,
            settle=_nothing,
        ),
    )


def preprocess(world: "World", number: int) -> Service:
    """A preprocess."""
    name = f"preprocess-{number}"
    return Service(world, name, lambda stop: serve_preprocess(world, f"{name}:1", MODEL_NAME, stop))


def encoder(world: "World", number: int) -> Service:
    """A vision encoder."""
    name = f"encoder-{number}"
    return Service(world, name, lambda stop: serve_encoder(world, f"{name}:1", MODEL_NAME, stop))


def gateway(world: "World", number: int) -> Service:
    """A gateway."""
    settings = _settings(
        GatewaySettings,
        model=model_folder(),
        served_model_name=MODEL_NAME,
        listen="unused:1",
        host=f"gateway-{number}",
        allow_unauthenticated=True,
        grpc_port=1,
        api_key=",".join(world.keys) or None,
        redis_url="redis://simulated",
        shutdown_timeout=3.0,
    )
    return Service(
        world,
        f"gateway-{number}",
        lambda stop: run_gateway(settings, stop, http=NoHttp, settle=_nothing),
    )
