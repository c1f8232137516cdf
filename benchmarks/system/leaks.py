"""Whether a process grows with the number of requests it has served: `make bench ARGS='leaks --until 50000'`.

A whole system with a tiny vision model and small caches, which are full before the first look, under clients of every
kind. Each process is measured after `--from` requests and after `--until`, when all has been quiet for as long as the
end of a request is remembered. It fails where one has grown.

Workers come and go: a service starts one where more is to do at a time than before, and ends one whose client has left.
A look waits until none is still starting. One that came between the looks is compared with the largest of its service
at the first, and a service may have as many as there are requests at a time.

Between the looks a row shows what requests with the longest stop strings take, four answers each: the largest resident
memory of gateway and scheduler while they are served, beside the one before.

Redis is shown and not judged: it keeps answers for ten minutes, as is promised.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.system.mixed_clients import VOCABULARY, Clients
from shared.telemetry.diagnostics import SIGNAL
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System

_MOST_BYTES = 5_000_000
_MOST_OBJECTS = 100
_LARGEST_BLOCK = 512  # bytes, of Python's own allocator
_SHARE_ANSWERED = 0.5  # seven of ten requests are plain ones
_QUIET_S = 13.0  # ends are remembered for ten seconds
_SETTLE_S = 2.0
_SETTLED_WITHIN_S = 60.0
_NUDGES = 64  # requests after which what was remembered has been let go
_ANSWER_S = 20.0
_STOPS_REQUESTS, _STOPS_AT_A_TIME = 64, 8
_PEAK_S = 0.05
_TAIL = 4000  # characters of the log that are shown if it fails
_SMALL = {
    "TESSERA_PREPROCESS_PIXEL_CACHE_BYTES": str(1 << 18),
    "TESSERA_PREPROCESS_MEDIA_STORE_BYTES": str(8 << 20),
    "TESSERA_VISION_ENCODER_ENCODER_CACHE_BYTES": str(1 << 18),
    "TESSERA_DECODER_EMBEDDING_CACHE_BYTES": str(1 << 18),
}
_FLAGS = ("--kv-cache-memory-bytes", str(2 << 20), "--num-host-blocks", "64")


@dataclass(frozen=True)
class Look:
    """What one process holds: see `shared/telemetry/diagnostics.py`."""

    rss_bytes: int
    used_bytes: int
    malloc_bytes: int
    blocks: int
    types: dict[str, int]


def main(arguments: list[str]) -> int:
    """Prints what has grown. Returns 1 if a process has, or a request failed."""
    told = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, _environment(Path(folder)):
        model = make_checkpoint(Path(folder) / "tiny", text={"vocab_size": VOCABULARY})
        with System(model, *_FLAGS) as system:
            try:
                before, after, counts, seconds = uvloop.run(_measure(system, Path(folder), told))
            except BaseException:
                print(system.log[-_TAIL:], file=sys.stderr)
                raise
    print(f"{told.until} requests; the last {told.until - told.first} took {seconds:.0f} s")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    if counts.get("plain 200", 0) < _SHARE_ANSWERED * told.until:
        print("too few requests were answered: what was measured is something else")
        return 1
    return judge(before, after, told.at_a_time)


def judge(before: dict[str, Look], after: dict[str, Look], most_workers: int) -> int:
    """Prints a line for each process. Returns 1 if one has grown, if a service is another process than before, or has
    more than `most_workers`."""
    missing = {name for name in before.keys() ^ after.keys() if not _is_worker(name)}
    failed = bool(missing)
    if missing:
        print(f"services have come or gone: {sorted(missing)}")
    for service, count in Counter(map(_service, filter(_is_worker, after))).items():
        if count > most_workers:
            failed = True
            print(f"{service} has {count} workers, for {most_workers} requests at a time")
    for name, two in sorted(after.items()):
        one = before.get(name) or _largest_worker(before, name)
        if one is None:
            print(f"{name:<22}{two.rss_bytes / 1e6:>9.1f} MB   new")
            continue
        bytes_ = two.rss_bytes - one.rss_bytes
        more = {kind: n - one.types.get(kind, 0) for kind, n in two.types.items()}
        grown = {kind: n for kind, n in more.items() if n > _MOST_OBJECTS}
        is_judged = _service(name) != "redis"
        bad = is_judged and (_held(one, two) > _MOST_BYTES or bool(grown))
        failed |= bad
        print(
            f"{name:<22}{one.rss_bytes / 1e6:>9.1f} MB{bytes_ / 1e6:>+9.1f} MB"
            f"{(two.used_bytes - one.used_bytes) / 1e6:>+9.1f} MB used"
            f"{(two.malloc_bytes - one.malloc_bytes) / 1e6:>+8.2f} MB of C's"
            f"{two.blocks - one.blocks:>+9} blocks   {'' if name in before else 'new '}{'GROWN' if bad else ''}"
            + "".join(f"\n    {kind}: {n:+}" for kind, n in grown.items())
        )
    return int(failed)


def _service(name: str) -> str:
    return name.partition(" ")[0]


def _is_worker(name: str) -> bool:
    return " worker " in name


def _largest_worker(looks: dict[str, Look], name: str) -> Look | None:
    """What a worker that has come later is compared with; None for a service, or the first worker of one."""
    others = (
        look
        for other, look in looks.items()
        if _is_worker(other) and _service(other) == _service(name)
    )
    return max(others, key=lambda look: look.rss_bytes, default=None) if _is_worker(name) else None


def _held(one: Look, two: Look) -> int:
    """Bytes in use by which a process has grown; free memory between allocations is not counted."""
    grown = two.used_bytes - one.used_bytes
    if not two.blocks:  # looked at from outside
        return grown
    held = two.malloc_bytes - one.malloc_bytes + _LARGEST_BLOCK * (two.blocks - one.blocks)
    return min(grown, held)


async def _measure(
    system: System, folder: Path, told: argparse.Namespace
) -> tuple[dict[str, Look], dict[str, Look], dict[str, int], float]:
    clients = Clients(system.port, system.grpc_address, "tiny", pictures=told.pictures)
    await clients.run(told.first, told.at_a_time)
    before = await _look(system, folder, clients)
    await _show_long_stops(system, clients)
    began = time.monotonic()
    await clients.run(told.until - told.first, told.at_a_time)
    seconds = time.monotonic() - began
    after = await _look(system, folder, clients)
    return before, after, dict(clients.counts), seconds


async def _show_long_stops(system: System, clients: Clients) -> None:
    """Prints the row of requests with the longest stop strings."""
    pids = [(name, pid) for name in ("gateway", "scheduler") for pid in system.pids()[name]]
    before = [psutil.Process(pid).memory_info().rss for _, pid in pids]
    most = list(before)
    sending = asyncio.create_task(clients.run(_STOPS_REQUESTS, _STOPS_AT_A_TIME, only="long_stops"))
    began = time.monotonic()
    while not sending.done():
        now = [psutil.Process(pid).memory_info().rss for _, pid in pids]
        most = list(map(max, most, now))
        await asyncio.sleep(_PEAK_S)
    await sending
    seconds = time.monotonic() - began
    print(
        f"{_STOPS_REQUESTS} requests with the longest stop strings took {seconds:.1f} s; resident"
    )
    for (name, pid), one, two in zip(pids, before, most, strict=True):
        print(f"{name} {pid}: {one / 1e6:.1f} MB before, {two / 1e6:.1f} MB at most")


async def _look(system: System, folder: Path, clients: Clients) -> dict[str, Look]:
    """All processes, when what is remembered for a while has been forgotten."""
    await asyncio.sleep(_QUIET_S)
    await clients.run(_NUDGES, 1)
    await _settled(system)
    found = {}
    for service, pids in system.pids().items():
        for pid in pids:
            process = psutil.Process(pid)
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found[f"{service} worker {child.pid}"] = _from_outside(child)
            is_ours = service != "redis"
            found[f"{service} {pid}"] = (
                await _ask(folder, pid) if is_ours else _from_outside(process)
            )
    launcher = psutil.Process(system.pid)
    found[f"launcher {system.pid}"] = _from_outside(launcher)
    return found


async def _settled(system: System) -> None:
    """Waits until no worker comes, goes or computes: one that is needed late is still importing on a busy machine."""
    before = None
    until = time.monotonic() + _SETTLED_WITHIN_S
    while time.monotonic() < until:
        await asyncio.sleep(_SETTLE_S)
        now = _processor_times(system)
        if now == before:
            return
        before = now


def _processor_times(system: System) -> dict[int, float]:
    """Seconds that each worker has computed, by its process id."""
    found = {}
    for pids in system.pids().values():
        for pid in pids:
            for child in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    times = child.cpu_times()
                    found[child.pid] = times.user + times.system
    return found


def _from_outside(process: psutil.Process) -> Look:
    rss_bytes = process.memory_info().rss
    return Look(rss_bytes, rss_bytes, 0, 0, {})


async def _ask(folder: Path, pid: int) -> Look:
    path = folder / f"{pid}.json"
    path.unlink(missing_ok=True)
    os.kill(pid, SIGNAL)
    async with asyncio.timeout(_ANSWER_S):
        while not path.exists():
            await asyncio.sleep(0.05)
    return Look(**json.loads(path.read_text()))


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """What the system's processes read from it."""
    values = {**_SMALL, "TESSERA_DIAGNOSTICS_DIR": str(folder)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="leaks", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=5_000, help="the first look")
    parser.add_argument("--until", type=int, default=50_000, help="the second")
    parser.add_argument("--at-a-time", type=int, default=48)
    parser.add_argument("--pictures", type=float, default=0.03, help="share of requests with one")
    return parser
