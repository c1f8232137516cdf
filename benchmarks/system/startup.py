"""From `tessera serve` to ready: seconds, and the processor time that each service has taken by then."""

import argparse
import statistics
import time
from pathlib import Path

import psutil

from tests.support.processes.system import System

_LAUNCHER = "launcher"


def main(arguments: list[str]) -> None:
    """Prints each start, then for each service the median of its processor seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="the demo model unless given")
    parser.add_argument("--repeats", type=int, default=3)
    options, flags = parser.parse_known_args(arguments)
    seconds, used = [], []
    for _ in range(options.repeats):
        began = time.perf_counter()
        with System(options.model, *flags) as system:
            seconds.append(time.perf_counter() - began)
            used.append(_processor_seconds(system))
        print(f"ready after {seconds[-1]:.1f} s; processors {sum(used[-1].values()):.1f} s")
    print(f"best {min(seconds):.1f} s; processor seconds, medians:")
    for service in used[0]:
        median = statistics.median(start.get(service, 0.0) for start in used)
        print(f"  {service:<15} {median:6.2f}")


def _processor_seconds(system: System) -> dict[str, float]:
    """User and system time of each service, with the processes that it has started."""
    launcher = psutil.Process(system.pid)
    services = {pid for pids in system.pids().values() for pid in pids}
    forking = [child for child in launcher.children() if child.pid not in services]
    used = {_LAUNCHER: _alone(launcher), "fork servers": sum(map(_family, forking))}
    for service, pids in system.pids().items():
        used[service] = sum(map(_family, map(psutil.Process, pids)))
    return used


def _family(process: psutil.Process) -> float:
    return sum(map(_alone, [process, *process.children(recursive=True)]))


def _alone(process: psutil.Process) -> float:
    """With those that it started and that have ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(sum(times[:4]))
