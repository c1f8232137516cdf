"""`tessera serve`: every room on this machine, until Ctrl-C."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

import structlog

from services.launcher import hardware
from services.launcher.child import Child, GaveUp
from services.launcher.embedded_redis import EmbeddedRedis
from services.launcher.folders import Folders
from services.launcher.invitation import invitation
from services.launcher.life import Program
from services.launcher.ports import require_free
from services.launcher.probe import RedisProbe
from services.launcher.rooms import Rooms, doors
from services.launcher.roster import Roster, System, waiting
from services.launcher.screen import LinesTo, open_screen
from services.launcher.settings import ServeSettings
from services.launcher.supervisor import Supervisor
from shared import processors
from shared.errors import ServingError
from shared.settings import child_environment
from shared.telemetry import configure_logs

log = structlog.get_logger(__name__)


def main(arguments: list[str]) -> int:
    """Serves until it is told to stop. Returns the exit status: 0, or 1 when it could not."""
    settings = ServeSettings.load(arguments, prog="tessera serve")
    try:
        hardware.require_instructions()
        require_free(settings.host, _ports(settings))
        if settings.redis_url:
            # Imported where it is needed: every start waits for the launcher's own.
            from services.launcher import redis_check

            redis_check.require(settings.redis_url)
        with Folders(settings.state_folder) as folders:
            return asyncio.run(_serve(settings, folders))
    except ServingError as error:
        print(f"tessera serve: {error.message}", file=sys.stderr)
        return 1


def _ports(settings: ServeSettings) -> dict[str, int]:
    """Flag -> port; a further gateway's ports are named after the flag that they follow from."""
    ports = {}
    for number, door in enumerate(doors(settings)):
        which = f" (gateway {number})" if number else ""
        ports[f"--port{which}"] = door.port
        ports[f"--grpc-port{which}"] = door.grpc_port
    return ports


async def _serve(settings: ServeSettings, folders: Folders) -> int:
    began = time.monotonic()
    redis = EmbeddedRedis(folders.state, folders.socket("redis"))
    rooms = Rooms(settings, folders, settings.redis_url or redis.url)
    stages = [rooms.gateways(), rooms.schedulers(), rooms.workers()]
    foundation = None if settings.redis_url else _redis_program(redis, settings.log_level)
    # Shown as a request meets them, while the stages stand in the order of stopping.
    shown = [*([foundation] if foundation else []), *(p for stage in stages for p in stage)]

    told = System(
        settings.model_name,
        [door.url for door in doors(settings)],
        settings.redis_url or redis.url,
        waiting((program.name, program.room) for program in shown),
    )
    with (
        Roster(folders.state, told) as roster,
        open_screen([program.name for program in shown], settings.log_format) as screen,
    ):
        lines = cast(TextIO, LinesTo(screen))
        configure_logs("launcher", settings.log_level, settings.log_format, lines)

        log.info("starting", model=str(settings.model), processors=str(processors.find()))

        children: dict[str, Child] = {}

        def on_state(name: str, state: str) -> None:
            screen.state(name, state)
            roster.note(name, state, children[name].pid, children[name].deaths)

        def child(program: Program) -> Child:
            made = Child(program, on_state=on_state, on_line=screen.line)
            return children.setdefault(program.name, made)

        supervisor = Supervisor(
            [[child(program) for program in stage] for stage in stages],
            child(foundation) if foundation else None,
            settings.shutdown_timeout,
        )

        def announce() -> None:
            screen.settle()
            log.info("ready", seconds=round(time.monotonic() - began, 1))
            if settings.log_format == "text":
                print(invitation(settings), flush=True)

        try:
            return await _until_told(supervisor, announce)
        except GaveUp as error:
            await supervisor.stop()
            screen.settle()
            print(_obituary(error), file=sys.stderr)
            return 1


def _redis_program(redis: EmbeddedRedis, log_level: str) -> Program:
    return Program(
        "redis",
        redis.command,
        child_environment(),
        RedisProbe(redis.socket_path),
        redis.socket_path,
        end_with=signal.SIGTERM,  # it writes its file out first, which takes no time
        room="redis",
        quiet=log_level != "debug",  # it warns of its own name and version
    )


async def _until_told(supervisor: Supervisor, announce: Callable[[], None]) -> int:
    """Runs everything until a signal has come and all is gone. Raises GaveUp."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():  # the second one: no patience left
            supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)

    stopping = asyncio.create_task(stop.wait())
    living = asyncio.create_task(_live(supervisor, announce))
    await asyncio.wait([stopping, living], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if living.done():
        living.result()  # raises GaveUp
    living.cancel()
    log.info("stopping")
    await supervisor.stop()
    return 0


async def _live(supervisor: Supervisor, announce: Callable[[], None]) -> None:
    """Starts all, says so once when all are ready, and goes on until something gives up."""
    await supervisor.start()
    await supervisor.all_ready()
    announce()
    await supervisor.watch()


def _obituary(error: GaveUp) -> str:
    lines = "\n".join(f"    {line}" for line in error.lines) or "    (it said nothing)"
    return (
        f"tessera serve: {error.name} does not come up: it {error.how}. Its last lines:\n{lines}\n"
        "Everything is stopped. `tessera doctor` looks for what is missing."
    )
