"""What the launcher shows in its metrics, and the list of all pages for Prometheus."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from services.launcher.supervise.process import Program
from services.launcher.supervise.supervised_process import SupervisedProcess
from shared.net.metrics_page import page, serve_metrics
from shared.telemetry.series import Measured, Series

_FILE = "metrics.json"

READY = Series(
    "tessera_process_ready", "gauge", "Whether a process is ready: 1, or 0.", ("process",)
)
CRASHES = Series(
    "tessera_process_crashes",
    "counter",
    "How often a process has ended without being told to, and was started again.",
    ("process",),
)
SERIES = (READY, CRASHES)


class LauncherMeasures:
    """Reads the processes of a system."""

    def __init__(self, processes: Mapping[str, SupervisedProcess]) -> None:
        self._processes = processes

    def read(self) -> Iterator[Measured]:
        """All series."""
        processes = self._processes.values()
        yield READY.by(((process.name,), int(process.ready.is_set())) for process in processes)
        yield CRASHES.by(((process.name,), process.crashes) for process in processes)


@contextlib.asynccontextmanager
async def open_pages(
    state: Path,
    programs: Sequence[Program],
    pages: Mapping[str, str],
    model_name: str,
    processes: Mapping[str, SupervisedProcess],
) -> AsyncIterator[None]:
    """Serves the launcher's page, and keeps the list of all in the state folder, until the block ends. `pages`:
    host:port by the names of the launcher and of `programs`; empty where none has one. Raises Unavailable.
    """
    measures = LauncherMeasures(processes)
    listen = pages.get("launcher", "")
    async with serve_metrics(listen, lambda: page("launcher", model_name, measures)):
        path = state / _FILE
        if pages:
            _write(path, programs, pages)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _write(path: Path, programs: Sequence[Program], pages: Mapping[str, str]) -> None:
    """In the form of Prometheus's file_sd_configs."""
    services = {"launcher": "launcher", **{program.name: program.service for program in programs}}
    groups = [
        {"targets": [pages[name]], "labels": {"job": service, "instance": name}}
        for name, service in services.items()
        if name in pages
    ]
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(groups, indent=1) + "\n")
    draft.rename(path)  # a reader finds the old file or the new one
