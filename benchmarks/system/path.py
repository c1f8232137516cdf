"""Where processor time goes between a client and the model: by process, for each token and for each request.

Serves a checkpoint and puts the `compare` workloads on it. Processor time is the kernel's count for each process, so it
says something on a busy machine too; tokens a second do not. `toy` checkpoints leave nothing but the path. `--roots`
takes two checkouts, served at once and asked in turns with the same prompts: it prints what a token costs in each.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import grpc
import psutil
import uvloop

from benchmarks.load.command import measure
from benchmarks.load.result import Result
from benchmarks.system import compare
from services.launcher.state.folders import Folders
from tessera.scheduler.v1.scheduler_pb2 import GetLoadRequest, StepTotals
from tessera.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.support.processes.system import System

_WARM_UP = 0.25  # of a workload's requests, before the measured ones


def main(arguments: list[str]) -> int:
    """Prints a table for each workload. Returns 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="path", description=__doc__)
    parser.add_argument(
        "model", type=Path, help="checkpoint folder: benchmarks.checkpoints makes some"
    )
    parser.add_argument("workloads", nargs="*", default=["toy-1", "toy-32", "toy-one-token"])
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    parser.add_argument("--words", action="store_true", help="prompts of words: tokenized by us")
    parser.add_argument("--serve", default="", help="flags for `tessera serve`, in one string")
    add = parser.add_argument
    add("--roots", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="compare two checkouts")
    add("--turns", type=int, default=20, help="of each checkout, for each workload")
    told = parser.parse_args(arguments)
    if told.roots:
        return compare_checkouts(told)
    failed = False
    with System(told.model, *told.serve.split(), ready_within_s=300) as system:
        for name in told.workloads:
            settings = ["--base-url", system.url, "--least", "2", *["--words"] * told.words]
            run_workload(name, [*settings, "--scale", str(told.scale * _WARM_UP)])
            before, steps_before = processor_seconds(system), step_totals(system)
            result = run_workload(name, [*settings, "--scale", str(told.scale)])
            spent = {
                service: s - before[service] for service, s in processor_seconds(system).items()
            }
            spent["(client)"] = result.client_cpu_s
            print(f"\n{compare.row(name, result)}  {result.requests_per_s:.1f} requests/s")
            print(table(spent, result))
            print(step_line(steps_before, step_totals(system)), flush=True)
            failed |= bool(result.failed)
    return int(failed)


def compare_checkouts(told: argparse.Namespace) -> int:
    """Prints for each workload and process what a token costs before and after, by the wall clock too, and the ratio of
    after to before: the median of the turns, and the 95 % interval of that median. Returns 1 if a request failed."""
    failed = False
    with ExitStack() as stack:
        systems = [stack.enter_context(_served(root.resolve(), told)) for root in told.roots]
        for name in told.workloads:
            turns: list[list[dict[str, float]]] = [[], []]
            for turn in range(-1, told.turns):  # one to warm up
                for side in (0, 1) if turn % 2 else (1, 0):
                    url, seed = systems[side].url, str(turn + 1)
                    settings = ["--base-url", url, "--least", "1", "--seed", seed]
                    settings += ["--words"] * told.words
                    before = processor_seconds(systems[side])
                    result = run_workload(name, [*settings, "--scale", str(told.scale)])
                    after = processor_seconds(systems[side])
                    failed |= bool(result.failed)
                    of_token = 1e6 / max(1, result.output_tokens)
                    spent = {
                        process: of_token * (s - before[process]) for process, s in after.items()
                    }
                    if turn >= 0:
                        passed = of_token * result.duration_s
                        turns[side].append(
                            {**spent, "all": sum(spent.values()), "(wall clock)": passed}
                        )
            print(f"\n{name}: {told.turns} turns\n{comparison_table(*turns)}", flush=True)
    return int(failed)


def comparison_table(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> str:
    """Of the same turns before and after, microseconds a token by process."""
    lines = [f"  {'us a token':<16}{'before':>10}{'after':>10}{'ratio':>8}   95 %"]
    for process in before[0]:
        pairs = [(b[process], a[process]) for b, a in zip(before, after, strict=True)]
        ratios = [a / b for b, a in pairs if b > 0]
        if not ratios:
            continue
        was, now = (median(side) for side in zip(*pairs, strict=True))
        low, high = interval(ratios)
        lines.append(
            f"  {process:<16}{was:>10.1f}{now:>10.1f}{median(ratios):>8.3f}   {low:.3f} to {high:.3f}"
        )
    return "\n".join(lines)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of their median, by bootstrap: the same for the same values."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[49], medians[1949]


def _served(root: Path, told: argparse.Namespace) -> System:
    """A checkout's system, with the libraries of this one."""
    path = f"PYTHONPATH={root}:{root / 'protos'}"
    program = ("env", "-C", str(root), path, sys.executable, "-m", "services.launcher")
    return System(told.model.resolve(), *told.serve.split(), ready_within_s=300, program=program)


def table(spent: dict[str, float], result: Result) -> str:
    """Microseconds for each token and request, and how much of a core each process had."""
    lines = [f"  {'process':<16}{'us a token':>12}{'us a request':>14}{'of a core':>11}"]
    for service, seconds in [
        *sorted(spent.items(), key=lambda item: -item[1]),
        ("all", sum(spent.values())),
    ]:
        of_token = 1e6 * seconds / max(1, result.output_tokens)
        of_request = 1e6 * seconds / max(1, result.completed)
        share = seconds / result.duration_s
        lines.append(f"  {service:<16}{of_token:>12.1f}{of_request:>14.0f}{share:>11.2f}")
    return "\n".join(lines)


def step_totals(system: System) -> StepTotals:
    """What the scheduler has summed up of the steps of the only decoder."""
    address = f"unix:{Folders(system.folder / 'state').socket('scheduler')}"
    with grpc.insecure_channel(address) as channel:
        load = SchedulerServiceStub(channel).GetLoad(GetLoadRequest(), timeout=10)
    totals: StepTotals = load.decoders[0].totals
    return totals


def step_line(before: StepTotals, after: StepTotals) -> str:
    """The mean of each part of a step, in milliseconds."""
    steps = max(1, after.steps - before.steps)
    parts = [field.name for field in StepTotals.DESCRIPTOR.fields if field.name.endswith("_us")]
    means = {p: (getattr(after, p) - getattr(before, p)) / steps / 1000 for p in parts}
    told = "  ".join(f"{part.removesuffix('_us')} {mean:.2f}" for part, mean in means.items())
    return f"  {steps} steps of {(after.tokens - before.tokens) / steps:.1f} tokens, ms: {told}"


def processor_seconds(system: System) -> dict[str, float]:
    """User and system time of each service so far, with the processes that it has started."""
    found = {}
    for service, pids in system.pids().items():
        processes = [p for pid in pids for p in _with_children(pid)]
        times = [process.cpu_times() for process in processes]
        found[service] = sum(t.user + t.system for t in times)
    return found


def _with_children(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def run_workload(name: str, arguments: list[str]) -> Result:
    """Puts one of `compare`'s workloads on a server."""
    told = compare.parser().parse_args([name, *arguments])
    settings = compare.settings_of(name, told).model_copy(update={"num_warmups": 0})
    _, result, _ = uvloop.run(measure(settings))
    return result


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
