"""Tokens per second of many streams through the gateway on the toy model, and where the processor time goes."""

import argparse
import asyncio
import resource
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.checkpoints import toy_model
from benchmarks.system.stream_client import Stream, ask
from tests.support.processes.system import System


def main(arguments: list[str]) -> None:
    """Prints tokens per second, latencies, and microseconds of processor time for each token by process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=toy_model.VOCABULARY)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = toy_model.make(Path(folder) / "toy", chosen.vocabulary)
        with System(model) as system:
            asyncio.run(_run(system.port, chosen.streams, chosen.prompt, 20))
            before = _processor_seconds(system)
            began = time.perf_counter()
            streams = asyncio.run(_run(system.port, chosen.streams, chosen.prompt, chosen.tokens))
            elapsed = time.perf_counter() - began
            spent = {
                name: seconds - before[name] for name, seconds in _processor_seconds(system).items()
            }
    tokens = sum(stream.tokens for stream in streams)
    firsts = sorted(stream.first for stream in streams)
    between = [gap for stream in streams for gap in stream.between]
    print(
        f"\n{chosen.streams} streams, {tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.0f} tokens/s"
    )
    print(
        f"first token: median {1000 * statistics.median(firsts):.0f} ms, last {1000 * firsts[-1]:.0f} ms"
    )
    print(f"between tokens: median {1000 * statistics.median(between):.1f} ms")
    print(f"\n{'process':18}{'us a token':>12}{'share of a core':>18}")
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{name:18}{1e6 * seconds / tokens:12.1f}{seconds / elapsed:18.2f}")


async def _run(port: int, streams: int, prompt: int, tokens: int) -> list[Stream]:
    prompts = [[(13 * s + 7 * i) % 200 + 2 for i in range(prompt)] for s in range(streams)]
    return await asyncio.gather(*(ask(port, "toy", p, tokens) for p in prompts))


def _processor_seconds(system: System) -> dict[str, float]:
    found = {}
    for service, pids in system.pids().items():
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        found[service] = sum(t.user + t.system for t in times)
    own = resource.getrusage(resource.RUSAGE_SELF)
    found["(this client)"] = own.ru_utime + own.ru_stime
    return found
