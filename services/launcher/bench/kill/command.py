"""`tessera bench kill`: finds the system, runs, reports."""

import contextlib
import sys
from pathlib import Path

import uvloop

from services.launcher.bench.errors import BenchError
from services.launcher.bench.kill.containers import Containers
from services.launcher.bench.kill.launched import launched
from services.launcher.bench.kill.processes import Processes
from services.launcher.bench.kill.report import Verdict, judge, table, to_json
from services.launcher.bench.kill.run import KillRun
from services.launcher.bench.kill.settings import KillSettings
from services.launcher.bench.kill.target import Target

_INTERRUPTED = 130  # what shells expect after Ctrl-C


def main(arguments: list[str]) -> int:
    """Returns 0 if nothing was lost, doubled or different, 1 if something was or nothing could be measured."""
    settings = KillSettings.load(arguments, prog="tessera bench kill")
    try:
        verdict = measure(settings)
    except (BenchError, ValueError) as error:
        print(f"tessera bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(table(verdict, settings))
    if settings.output:
        settings.output.write_text(to_json(verdict, settings))
    return 1 if verdict.problems(settings) else 0


def measure(settings: KillSettings) -> Verdict:
    """Runs on the system that the settings mean. Raises BenchError."""
    with contextlib.ExitStack() as stack:
        state = settings.state_folder
        if settings.launch:
            state = stack.enter_context(launched(settings.serve))
        return uvloop.run(_measure(settings, state))


async def _measure(settings: KillSettings, state: Path) -> Verdict:
    target: Target = Containers(settings.project) if settings.compose else Processes(state)
    run = KillRun(settings, target)
    try:
        return judge(await run.run())
    finally:
        await run.close()
