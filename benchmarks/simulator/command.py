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
    options = _parser().parse_args(arguments)
    failed = False
    results = {}
    for policy in options.policy:
        outcome = _run(options, policy)
        failed |= bool(outcome.leaks or outcome.lost)
        print(f"\n{policy}: {options.decoders} decoders\n{outcome.table()}", flush=True)
        if options.goal_s:
            print(f"{'goal':<18} simulated in {options.goal_s:g} s")
        results[policy] = outcome.to_json()
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


def _run(options: argparse.Namespace, policy: str) -> Outcome:
    shard_options = ShardOptions(
        decoders=options.decoders,
        capacity=Capacity(options.blocks + 1, 16, options.slots, 16_384, options.batched_tokens),
        timing=Timing(options.step_ms / 1000, options.token_us / 1e6, options.row_us / 1e6),
        step_target_s=options.step_target_ms / 1000,
        policy=policy,
        encoders=options.encoders,
    )
    arrivals = (
        trace.read(options.trace) if options.trace else trace.generated(_trace_options(options))
    )
    began = time.perf_counter()
    shards = simulate(counted(arrivals, options.say_every), shard_options, options.processes)
    return Outcome(shards, time.perf_counter() - began)


def _trace_options(options: argparse.Namespace) -> trace.TraceOptions:
    return trace.TraceOptions(
        requests=options.requests,
        rate=options.rate * options.decoders,
        burstiness=options.burstiness,
        surge=options.surge,
        prefixes=options.prefixes,
        zipf=options.zipf,
        prefix_tokens=options.prefix_tokens,
        own_tokens=options.own_tokens,
        output_tokens=options.output_tokens,
        with_picture=options.with_picture,
        encode_s=options.encode_ms / 1000,
        seed=options.seed,
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
    add("--step-target-ms", type=float, default=250.0, help="while sequences decode; 0 is any")
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
