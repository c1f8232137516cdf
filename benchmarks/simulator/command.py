"""`make bench ARGS='simulator --decoders 1000 --requests 1000000'`"""

import argparse
import json
import time
from pathlib import Path

from benchmarks.simulator import trace
from benchmarks.simulator.decoder import Timing
from benchmarks.simulator.fleet import counted, simulate
from benchmarks.simulator.outcome import Outcome
from benchmarks.simulator.policies import POLICIES
from benchmarks.simulator.shard import ShardOptions
from services.scheduler.core.budget import Capacity


def main(arguments: list[str]) -> int:
    """Simulates once for each policy that is named. Returns 1 if a request did not end or anything was left behind."""
    told = _parser().parse_args(arguments)
    failed = False
    results = {}
    for policy in told.policy:
        outcome = _run(told, policy)
        failed |= bool(outcome.leaks or outcome.lost)
        print(f"\n{policy}: {told.decoders} decoders\n{outcome.table()}", flush=True)
        if told.goal_s:
            print(f"{'goal':<18} simulated in {told.goal_s:g} s")
        results[policy] = outcome.to_json()
    if told.output:
        told.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


def _run(told: argparse.Namespace, policy: str) -> Outcome:
    options = ShardOptions(
        decoders=told.decoders,
        capacity=Capacity(told.blocks + 1, 16, told.slots, 16_384, told.batched_tokens),
        timing=Timing(told.step_ms / 1000, told.token_us / 1e6, told.row_us / 1e6),
        policy=policy,
        encoders=told.encoders,
    )
    arrivals = trace.read(told.trace) if told.trace else trace.generated(_trace_options(told))
    began = time.perf_counter()
    shards = simulate(counted(arrivals, told.say_every), options, told.processes)
    return Outcome(shards, time.perf_counter() - began)


def _trace_options(told: argparse.Namespace) -> trace.TraceOptions:
    return trace.TraceOptions(
        requests=told.requests,
        rate=told.rate * told.decoders,
        burstiness=told.burstiness,
        surge=told.surge,
        prefixes=told.prefixes,
        zipf=told.zipf,
        prefix_tokens=told.prefix_tokens,
        own_tokens=told.own_tokens,
        output_tokens=told.output_tokens,
        with_picture=told.with_picture,
        encode_s=told.encode_ms / 1000,
        seed=told.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    add = parser.add_argument
    defaults, timing = trace.TraceOptions(), Timing()
    add("--policy", nargs="+", choices=POLICIES, default=["affinity"])
    add("--decoders", type=int, default=100)
    add("--processes", type=int, default=2, help="the decoders are divided among them")
    add("--blocks", type=int, default=4096, help="KV blocks of 16 tokens, of each decoder")
    add("--slots", type=int, default=64)
    add("--batched-tokens", type=int, default=1024)
    add("--step-ms", type=float, default=1000 * timing.step_s, help="what any step takes")
    add("--token-us", type=float, default=1e6 * timing.token_s, help="and each token in it")
    add("--row-us", type=float, default=1e6 * timing.row_s, help="and each sequence in it")
    add("--encoders", type=int, default=4, help="of each process")
    add("--trace", type=Path, help="JSONL file of requests instead of generated ones")
    add("--requests", type=int, default=defaults.requests)
    add("--rate", type=float, default=40.0, help="requests a second for each decoder")
    add("--burstiness", type=float, default=defaults.burstiness, help="1 is Poisson, below bursts")
    add("--surge", type=float, default=1.0, help="rate in a fifth of each second: times the mean")
    add("--prefixes", type=int, default=defaults.prefixes)
    add("--zipf", type=float, default=defaults.zipf, help="exponent of their popularity")
    add("--prefix-tokens", type=int, default=defaults.prefix_tokens, help="mean")
    add("--own-tokens", type=int, default=defaults.own_tokens, help="mean")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="mean")
    add("--with-picture", type=float, default=0.0, help="share of requests")
    add("--encode-ms", type=float, default=1000 * defaults.encode_s)
    add("--seed", type=int, default=0)
    add("--say-every", type=int, default=100_000)
    add("--goal-s", type=float, help="printed beside the time that it took; nothing else")
    add("--output", type=Path, help="file for the results as JSON")
    return parser
