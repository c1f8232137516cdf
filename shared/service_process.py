"""The life cycle of a service's process: signals, exit status, garbage collection."""

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
import uvloop

from shared.errors import InvalidRequest, NotFound, ServingError
from shared.net import internal_token
from shared.settings import diagnostics_folder
from shared.telemetry import diagnostics, logs

log = structlog.get_logger(__name__)


def run(
    main: Callable[[asyncio.Event], Awaitable[int | None]], token_file: Path | None = None
) -> NoReturn:
    """Runs a service until SIGTERM or SIGINT sets the event, then exits with what `main` returned.

    `token_file` holds the token that the services of a system require of each other.

    A `ServingError` that `main` raises is logged as one line and exits with status 1, or with 2 where
    its settings are wrong, so that starting it again would be of no use.
    """

    async def body() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        folder = diagnostics_folder()
        answering: AbstractContextManager[None] = nullcontext()
        if folder is not None:
            answering = diagnostics.answering(partial(diagnostics.write_report, folder))
        try:
            internal_token.use(token_file)
            with answering:
                return await main(stop) or 0
        except ServingError as error:
            log.error("cannot go on", reason=error.reason, error=error.message)
            return 2 if isinstance(error, InvalidRequest | NotFound) else 1

    gc.freeze()  # what imports have made
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(body())
    raise SystemExit(status)


def load_without_collecting() -> None:
    """Called before a service imports its libraries and loads a model: what both make lives on, and collecting garbage
    after every 700 objects takes a tenth of their time. `settle` ends this.
    """
    gc.disable()


def settle() -> None:
    """Called when a service has loaded and before it reports that it is ready, since nothing else of the process runs
    meanwhile: what exists now lives as long as the process and is not scanned again.

    Garbage is looked for where it was not while the service loaded, in what came after its imports. Later objects are
    freed by their reference counts, all but a few cycles: scanning for those after every 700 objects would cost a share
    of each step, and a pause that grows with the number of sequences.
    """
    if not gc.isenabled():
        gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    gc.enable()
