"""`tessera serve`: every service on this machine, until Ctrl-C."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

import structlog

from services.launcher.banner import banner
from services.launcher.console.console import ConsoleStream, KeptConsole, open_console
from services.launcher.doctor import hardware
from services.launcher.model_folder import with_model_folder
from services.launcher.ports import require_free
from services.launcher.redis.embedded_redis import PRIVATE, EmbeddedRedis
from services.launcher.service_commands import (
    ServiceCommands,
    count_encoders,
    fork_groups,
    gateway_addresses,
)
from services.launcher.service_environment import KEY_VARIABLES
from services.launcher.settings import ServeSettings
from services.launcher.state.folders import Folders
from services.launcher.state.log_files import LogFiles
from services.launcher.supervise.fork_servers import ForkServers
from services.launcher.supervise.measures import open_pages
from services.launcher.supervise.probe import RedisProbe
from services.launcher.supervise.process import Program
from services.launcher.supervise.process_table import ProcessTable, System, waiting
from services.launcher.supervise.supervised_process import GaveUp, SupervisedProcess
from services.launcher.supervise.supervisor import Supervisor
from shared import access
from shared.errors import ServingError
from shared.hardware import npu_leases, processors
from shared.net.metrics_page import split_address
from shared.net.server_tls import ServerTls
from shared.settings import child_environment
from shared.telemetry.logs import configure_logs, on_loop_error
from shared.telemetry.lossy_stream import LossyStream

log = structlog.get_logger(__name__)


def main(arguments: list[str], fork_servers: ForkServers) -> int:
    """Serves until a signal, by `fork_servers` of the usual groups. The exit status: 0, or 1 if it could not serve."""
    settings = ServeSettings.load(arguments, prog="tessera serve")
    try:
        hardware.require_instructions()
        npus = hardware.require_device(settings.device)
        access.require_keys_or_loopback(
            settings.api_keys,
            settings.host,
            allow_unauthenticated=settings.allow_unauthenticated,
        )
        ServerTls.of(settings)
        require_free(settings.host, _ports(settings))
        _require_pages(settings)
        if queue_url := settings.queue_url:
            # Imported where it is needed: every start waits for the launcher's own.
            from services.launcher.redis import check as redis_check

            redis_check.require(queue_url)
        configure_logs("launcher", settings.log_level, settings.log_format)  # for a download
        fork_servers.use(fork_groups(settings))
        settings = with_model_folder(settings)
        npus = _lease(npus, settings)
        with Folders(settings.state_folder) as folders:
            return asyncio.run(_serve(settings, folders, npus, fork_servers))
    except ServingError as error:
        if settings.log_format == "text":
            print(f"tessera serve: {error.message}", file=sys.stderr)
        else:
            configure_logs("launcher", settings.log_level, settings.log_format)
            log.critical("cannot serve", reason=error.reason, error=error.message)
        return 1


def _lease(npus: list[int], settings: ServeSettings) -> list[int]:
    """As many of the NPUs as decoders and encoders have a use for, of those that no other system of this host has.
    Raises Unavailable where a decoder would have none, or too few for its ranks."""
    if not npus:
        return []
    ranks, encoders = settings.tensor_parallel_size, count_encoders(settings)
    wanted = settings.decoders * ranks
    if wanted > len(npus) and ranks > 1:
        return npus  # which is refused for that, and not for what others have
    return npu_leases.take(npus, min(wanted, len(npus)), wanted + encoders)


def _ports(settings: ServeSettings) -> dict[str, int]:
    """Flag -> port; a further gateway's ports are named after the flag that they are counted from."""
    ports = {}
    for number, address in enumerate(gateway_addresses(settings)):
        which = f" (gateway {number})" if number else ""
        ports[f"--port{which}"] = address.port
        ports[f"--grpc-port{which}"] = address.grpc_port
    return ports


def _require_pages(settings: ServeSettings) -> None:
    """Raises InvalidRequest or Unavailable where the pages of metrics cannot be had."""
    if settings.metrics_listen:
        host, port = split_address(settings.metrics_listen)
        require_free(host, {"--metrics-listen": port})


async def _serve(
    settings: ServeSettings, folders: Folders, npus: list[int], fork_servers: ForkServers
) -> int:
    began = time.monotonic()
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    redis = EmbeddedRedis(folders.state, folders.socket("redis"))
    commands = ServiceCommands(
        settings, folders, settings.redis_url or redis.url, npus, fork_servers
    )
    stages = [commands.gateways(), commands.schedulers(), commands.workers()]
    foundation = None if settings.redis_url else _redis_program(redis, settings.log_level)
    # Shown in the order in which a request passes them; the stages are in the order of stopping.
    shown = [*([foundation] if foundation else []), *(p for stage in stages for p in stage)]

    password_file = settings.redis_password_file
    system = System(
        settings.model_name,
        [address.url for address in gateway_addresses(settings)],
        settings.redis_url or redis.url,
        str(password_file.expanduser().absolute()) if password_file else "",
        waiting((program.name, program.service) for program in shown),
    )
    with (
        ProcessTable(folders.state, system) as process_table,
        open_console(
            [program.name for program in shown],
            settings.log_format,
            shows_states=settings.log_level in ("debug", "info"),
        ) as shown_console,
        LogFiles(folders.state / "logs") as log_files,
    ):
        console = KeptConsole(shown_console, log_files.write)
        lines = cast(TextIO, ConsoleStream(console))
        configure_logs("launcher", settings.log_level, settings.log_format, lines)

        if folders.was_open:
            log.warning(
                f"{folders.state} could be read by others: it is now for its owner alone",
                mode=f"{folders.was_open:04o}",
            )
        log.info("starting", model=str(settings.model), processors=str(processors.find()))

        processes: dict[str, SupervisedProcess] = {}

        def on_state(name: str, state: str) -> None:
            console.state(name, state)
            process = processes[name]
            process_table.update(name, state, process.pid, process.crashes)

        def supervised(program: Program) -> SupervisedProcess:
            process = SupervisedProcess(program, on_state=on_state, on_line=console.line)
            return processes.setdefault(program.name, process)

        supervisor = Supervisor(
            [[supervised(program) for program in stage] for stage in stages],
            supervised(foundation) if foundation else None,
            settings.shutdown_timeout,
        )

        def announce() -> None:
            console.settle()
            log.info("ready", seconds=round(time.monotonic() - began, 1))
            if settings.log_format == "text":
                print(banner(settings), file=LossyStream(sys.stdout), flush=True)

        try:
            async with open_pages(
                folders.state, shown, commands.metrics, settings.model_name, processes
            ):
                return await _until_signal(supervisor, announce, fork_servers)
        except GaveUp as error:
            await supervisor.stop()
            console.settle()
            if settings.log_format == "text":
                print(_failure(error), file=LossyStream(sys.stderr))
            else:
                last = error.lines[-1] if error.lines else ""
                log.critical(f"{error.name} does not come up", how=error.how, last_line=last)
            return 1


def _redis_program(redis: EmbeddedRedis, log_level: str) -> Program:
    return Program(
        "redis",
        redis.command,
        child_environment(*KEY_VARIABLES),
        RedisProbe(redis.socket_path),
        redis.socket_path,
        end_with=signal.SIGTERM,  # it flushes its file first, which takes no time
        service="redis",
        quiet=log_level != "debug",  # it warns of its own name and version
        umask=PRIVATE,
    )


async def _until_signal(
    supervisor: Supervisor, announce: Callable[[], None], fork_servers: ForkServers
) -> int:
    """Runs everything until a signal has come and all processes have ended. Raises GaveUp."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():  # the second signal: at once
            supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)

    stopping = asyncio.create_task(stop.wait())
    running = asyncio.create_task(_run(supervisor, announce))
    await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        running.result()  # raises GaveUp
    running.cancel()
    log.info("stopping")
    fork_servers.close()  # a process that waits for its libraries would be late to end
    await supervisor.stop()
    return 0


async def _run(supervisor: Supervisor, announce: Callable[[], None]) -> None:
    """Starts all, calls `announce` once when all are ready, and goes on until something gives up."""
    await supervisor.start()
    await supervisor.all_ready()
    announce()
    await supervisor.watch()


def _failure(error: GaveUp) -> str:
    lines = "\n".join(f"    {line}" for line in error.lines) or "    (it said nothing)"
    likely = (
        "The kernel ends a process so when memory runs out (`dmesg` says it): a smaller model, --dtype bfloat16 or a"
        " lower --kv-cache-memory-bytes helps. "
        if error.how.endswith("SIGKILL")
        else ""
    )
    return (
        f"tessera serve: {error.name} does not come up: it {error.how}. Its last lines:\n{lines}\n"
        f"{likely}Everything is stopped."
    )
