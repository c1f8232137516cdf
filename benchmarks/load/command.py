"""`tessera bench serve`: warms up, measures, reports."""

import asyncio
import gc
import sys
import time

import uvloop

from benchmarks.load import progress, report
from benchmarks.load.errors import BenchError
from benchmarks.load.load import Load, Pacing
from benchmarks.load.recording import Recording
from benchmarks.load.result import Result, summarise
from benchmarks.load.server import Server
from benchmarks.load.settings import BenchSettings
from benchmarks.load.workload import Workload
from shared.client.http import HttpClient

_USAGE = (
    "usage: tessera bench <what> [options]\n\n"
    "  serve     load on a server with OpenAI's API, and what a client saw of it\n"
    "  kill      load on a Tessera whose processes are killed, and what was lost; also `--kill decoder,redis`\n\n"
    "`tessera bench serve --help` and `tessera bench kill --help` list the options."
)
_INTERRUPTED = 130  # what shells expect after Ctrl-C


def main(arguments: list[str]) -> int:
    """Runs `tessera bench <what>`. Returns 0, 1 if a request failed or nothing could be measured, 2 for bad usage."""
    if arguments[:1] == ["kill"]:
        return _kill(arguments[1:])
    if arguments and arguments[0].partition("=")[0] == "--kill":
        return _kill(arguments)
    if arguments[:1] != ["serve"]:
        asked = arguments[:1] in (["-h"], ["--help"], ["help"])
        print(_USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    settings = BenchSettings.load(arguments[1:], prog="tessera bench serve")
    try:
        result = uvloop.run(run(settings))
    except (BenchError, ValueError) as error:
        print(f"tessera bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 1 if result.failed else 0


def _kill(arguments: list[str]) -> int:
    from benchmarks.kill import command  # has libraries of its own, and needs generated protos

    return command.main(arguments)


async def run(settings: BenchSettings) -> Result:
    """Measures once, prints the table and writes the files. Raises BenchError, ValueError for a bad --base-url."""
    model, result, recordings = await measure(settings)
    print(report.table(result))
    for file in report.write(settings, model, result, recordings):
        print(f"written to {file}")
    return result


async def measure(settings: BenchSettings) -> tuple[str, Result, list[Recording]]:
    """The model's name, what was measured, and every request. Raises as `run`."""
    client = HttpClient(settings.base_url, settings.api_key, settings.tls())
    try:
        server = Server(client, settings.endpoint, settings.request_timeout)
        model = settings.model or await server.only_model()
        workload = await _accepted_workload(settings, server, model)
        await _warm_up(settings, server, workload)
        load = Load(
            server.complete, workload.bodies(settings.num_prompts), pacing(settings), settings.seed
        )
        return model, await _measured(settings, load), load.recordings
    finally:
        client.close()


def pacing(settings: BenchSettings) -> Pacing:
    """When requests are sent, by the settings."""
    return Pacing(
        settings.request_rate,
        settings.arrivals == "constant",
        settings.burstiness,
        settings.max_concurrency,
    )


async def _accepted_workload(settings: BenchSettings, server: Server, model: str) -> Workload:
    """Sends one such request first. If the server refuses `return_token_ids`, the others go without it."""
    workload = Workload(settings, model, return_token_ids=settings.return_token_ids)
    refusal = await server.refusal(workload.probe())
    if refusal and settings.return_token_ids:
        workload = Workload(settings, model, return_token_ids=False)
        if not await server.refusal(workload.probe()):
            print("the server gives no token ids: tokens are counted by events", file=sys.stderr)
            return workload
    if refusal:
        raise BenchError(f"the server refuses such requests: {refusal}")
    return workload


async def _warm_up(settings: BenchSettings, server: Server, workload: Workload) -> None:
    bodies = workload.bodies(settings.num_warmups, "warm-up")
    lanes = Pacing(concurrency=settings.max_concurrency or settings.num_warmups or 1)
    load = Load(server.complete, bodies, lanes, settings.seed)
    await load.run()
    failed = [r.error for r in load.recordings if not r.succeeded]
    if failed:
        raise BenchError(f"a warm-up request failed: {failed[0]}")


async def _measured(settings: BenchSettings, load: Load) -> Result:
    gc.collect()
    gc.disable()  # a pause of this client would be measured as one of the server
    began = time.process_time()
    try:
        async with progress.shown(load, enabled=not settings.disable_tqdm):
            duration = await load.run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        spent = time.process_time() - began
        gc.enable()
    return summarise(load.recordings, duration, settings.objectives, spent)
