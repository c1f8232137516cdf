"""`tessera bench kill`: finds the system, runs, reports."""

import contextlib
import sys
from pathlib import Path

import uvloop

from benchmarks.kill.containers import Containers
from benchmarks.kill.launched import launched
from benchmarks.kill.poison import Poisoned, PoisonRun
from benchmarks.kill.processes import Processes
from benchmarks.kill.report import Verdict, judge, table, to_json
from benchmarks.kill.run import KillRun
from benchmarks.kill.settings import KillSettings
from benchmarks.kill.target import Target
from benchmarks.load.errors import BenchError

_INTERRUPTED = 130  # what shells expect after Ctrl-C


def main(arguments: list[str]) -> int:
    """Returns 0 if nothing was lost, doubled or different, 1 if something was or nothing could be measured."""
    settings = KillSettings.load(arguments, prog="tessera bench kill")
    try:
        verdict, poisoned = measure(settings)
    except (BenchError, ValueError) as error:
        print(f"tessera bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(table(verdict, settings))
    problems = verdict.problems(settings)
    if poisoned is not None:
        print(poisoned.text(settings))
        problems += poisoned.problems(settings)
    if settings.output:
        settings.output.write_text(to_json(verdict, settings))
    return 1 if problems else 0


def measure(settings: KillSettings) -> tuple[Verdict, Poisoned | None]:
    """Runs on the system that the settings mean. Raises BenchError."""
    with contextlib.ExitStack() as stack:
        state = settings.state_folder
        fills_disk = any(victim.needs_full_disk for victim in settings.plan_of_victims)
        if settings.launch:
            state = stack.enter_context(launched(settings.serve, on_small_disk=fills_disk))
        elif fills_disk:
            raise BenchError("a disk is only filled for a system of its own: give --launch as well")
        return uvloop.run(_measure(settings, state))


async def _measure(settings: KillSettings, state: Path) -> tuple[Verdict, Poisoned | None]:
    target: Target = Containers(settings.project) if settings.compose else Processes(state)
    run = KillRun(settings, target)
    try:
        verdict = judge(await run.run())
        if not settings.poison:
            return verdict, None
        return verdict, await PoisonRun(settings, state, run).run()
    finally:
        await run.close()
