"""What timelines, metrics, traces and the log line of each request cost, as a share of all processor time.

The system is served from a copy of the source in which the functions of these modules are counted
(`counted_time.py`); the time of scripts in Redis is its own slow log. What a caller spends on making arguments is not
counted, nor are the pages of metrics, which nobody asks for here. None of this is an option of the product.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import numpy as np
import redis

from benchmarks.load.result import Result
from benchmarks.system import counted_time
from benchmarks.system.counted_time import KINDS
from benchmarks.system.path import processor_seconds, run_workload
from services.launcher.state.folders import Folders
from shared.queue.scripts import source
from tests.support.processes.system import System

_ROOT = Path(__file__).parents[2]
_SOURCES = ("services", "shared", "protos")
_TELEMETRY = "services/gateway/telemetry"
MODULES = {
    "timelines": (
        "shared/telemetry/timeline.py",
        "shared/queue/stores/timeline_store.py",
        "services/scheduler/decoders/step_trace.py",
    ),
    "metrics": (
        "shared/telemetry/series.py",
        "services/scheduler/decoders/step_statistics.py",
        *(f"services/{name}/measures.py" for name in ("decoder", "preprocess", "scheduler")),
        *(f"{_TELEMETRY}/metrics/{name}.py" for name in ("metrics", "token_series")),
        *(f"{_TELEMETRY}/metrics/{name}.py" for name in ("http_metrics", "scheduler_load")),
        f"{_TELEMETRY}/metrics/reporter.py",
    ),
    "traces": tuple(f"{_TELEMETRY}/traces/{name}.py" for name in ("trace_export", "otlp")),
    "log lines": (f"{_TELEMETRY}/request_log.py",),
}
SCRIPTS = {"timeline": "timelines", "traces": "traces"}
_COUNT = "\nfrom shared import counted_time\n\ncounted_time.count(globals(), {kind!r})\n"
# Counters and histograms of the library are used as they are.
_LIBRARY = "import prometheus_client.metrics\n\ncounted_time.count(vars(prometheus_client.metrics), 'metrics')\n"
_WARM_UP = 0.25  # of the measured requests


def main(arguments: list[str]) -> int:
    """Prints a table for each workload. Returns 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="telemetry", description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint folder: benchmarks.checkpoints")
    parser.add_argument("workloads", nargs="*", default=["toy-32"], help="those of compare")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    parser.add_argument("--turns", type=int, default=5, help="of each workload")
    parser.add_argument("--traces", action="store_true", help="export traces, to nobody")
    told = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as folder, _served(Path(folder), told) as system:
        counts = Counts(system, Path(folder) / "counts")
        for name in told.workloads:
            settings = ["--base-url", system.url, "--least", "2"]
            run_workload(name, [*settings, "--scale", str(told.scale * _WARM_UP)])
            for _ in range(told.turns):
                before, spent_before = counts.look(), processor_seconds(system)
                counts.begin_scripts()
                result = run_workload(name, [*settings, "--scale", str(told.scale)])
                scripts = counts.scripts()
                after, spent_after = counts.look(), processor_seconds(system)
                spent = {process: s - spent_before[process] for process, s in spent_after.items()}
                print(f"\n{name}: {result.output_tokens} tokens, {result.completed} requests")
                print(table(spent, taken(before, after), scripts, result), flush=True)
                failed |= bool(result.failed)
    return int(failed)


class Counts:
    """What the processes of a system count."""

    def __init__(self, system: System, folder: Path) -> None:
        self._system, self._folder = system, folder
        socket = Folders(system.folder / "state").socket("redis")
        self._redis = redis.Redis(unix_socket_path=str(socket))
        self._names = {_digest(name): name for name in SCRIPTS}

    def look(self) -> dict[tuple[str, int], list[float]]:
        """The page of each process that has one, by its service and id."""
        found: dict[tuple[str, int], list[float]] = {}
        for service, pids in self._system.pids().items():
            for pid in pids:
                path = self._folder / str(pid)
                if path.exists():
                    found[service, pid] = np.fromfile(path, np.float64).tolist()
        return found

    def begin_scripts(self) -> None:
        """Every call from now on is in the slow log."""
        self._redis.config_set("slowlog-max-len", 1_000_000)
        self._redis.config_set("slowlog-log-slower-than", 0)
        self._redis.slowlog_reset()

    def scripts(self) -> dict[str, float]:
        """The share of each kind in the time of all calls since. Each call counts as the median of those of its script
        or command: the log has times by the clock, and some calls were interrupted."""
        durations: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
        for call in self._redis.slowlog_get(1_000_000):
            words = call["command"].split(b" ", 2)
            is_script = words[0].upper().startswith(b"EVAL")
            durations[tuple(words[: 1 + is_script])].append(call["duration"])
        self._redis.config_set("slowlog-log-slower-than", -1)
        times: dict[str, float] = defaultdict(float)
        for words, found in durations.items():
            name = self._names.get(words[-1].decode(errors="replace"), "")
            times[SCRIPTS.get(name, "")] += median(found) * len(found)
        return {kind: spent / sum(times.values()) for kind, spent in times.items() if kind}


def taken(
    before: Mapping[tuple[str, int], list[float]], after: Mapping[tuple[str, int], list[float]]
) -> dict[str, list[tuple[float, float, float]]]:
    """Of each service and kind: seconds, calls, and the seconds that counting took beside."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for (service, pid), page in after.items():
        was = before.get((service, pid), [0.0] * len(page))
        inside, whole = page[-2], page[-1]
        row = []
        for number in range(0, 2 * len(KINDS) - 2, 2):
            calls = page[number + 1] - was[number + 1]
            seconds = page[number] - was[number] - calls * inside
            row.append((max(0.0, seconds), calls, calls * whole))
        sums = found.get(service, [(0.0, 0.0, 0.0)] * len(row))
        found[service] = [
            (a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(sums, row, strict=True)
        ]
    return found


def table(
    spent: Mapping[str, float],
    counted: Mapping[str, list[tuple[float, float, float]]],
    scripts: Mapping[str, float],
    result: Result,
) -> str:
    """Microseconds for each token by process, what of it each kind took, and the share of all."""
    kinds = KINDS[:-1]
    of_token = 1e6 / max(1, result.output_tokens)
    sums, everything = dict.fromkeys(kinds, 0.0), 0.0
    lines = [f"  {'us a token':<16}{'all':>9}" + "".join(f"{kind:>18}" for kind in kinds)]
    for service, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        rows = dict(zip(kinds, counted.get(service, [(0.0, 0.0, 0.0)] * len(kinds)), strict=True))
        own = seconds - sum(counting for _, _, counting in rows.values())
        everything += own
        cells = []
        for kind, (took, calls, _) in rows.items():
            took = took or scripts.get(kind, 0.0) * seconds * (service == "redis")
            sums[kind] += took
            cells.append(
                f"{of_token * took:>9.3f} ({calls / max(1, result.completed):>4.0f})"
                if took
                else ""
            )
        lines.append(f"  {service:<16}{of_token * own:>9.1f}" + "".join(f"{c:>18}" for c in cells))
    shares = "".join(f"{sums[kind] / everything:>18.2%}" for kind in kinds)
    lines.append(f"  {'share of all':<16}{of_token * everything:>9.1f}{shares}")
    return "\n".join(lines) + "\n  in brackets: calls for each request"


@contextmanager
def _served(folder: Path, told: argparse.Namespace) -> Iterator[System]:
    """A system from a copy of the source that counts."""
    copy, counts = folder / "copy", folder / "counts"
    counts.mkdir()
    for name in _SOURCES:
        shutil.copytree(_ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = Path(counted_time.__file__).read_text()
    (copy / "shared/counted_time.py").write_text(
        text.replace('FOLDER = "."', f"FOLDER = {str(counts)!r}")
    )
    for kind, files in MODULES.items():
        for file in files:
            with (copy / file).open("a") as module:
                module.write(_COUNT.format(kind=kind))
                if file.endswith("/metrics.py"):
                    module.write(_LIBRARY)
    with _collector() as port:
        exported = [f"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:{port}"]
        exported.append("OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf")
        program = ["env", "-C", str(copy), f"PYTHONPATH={copy}:{copy / 'protos'}"]
        program += exported * told.traces
        program += [sys.executable, "-m", "services.launcher"]
        with System(told.model.resolve(), ready_within_s=300, program=program) as system:
            yield system


@contextmanager
def _collector() -> Iterator[int]:
    """Takes traces and forgets them; the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Taker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Any body."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def _digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
