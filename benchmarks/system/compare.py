"""One server over a table of workloads: `make bench ARGS='compare --base-url http://127.0.0.1:8000 text-1 text-8'`.

The same command measures Tessera and its peers, so that rows can be laid side by side. A result file of an earlier run
(`--against`) adds the ratio to it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load.command import measure
from benchmarks.load.errors import BenchError
from benchmarks.load.result import Result
from benchmarks.load.settings import BenchSettings

_TEXT = {"random_input_len": 263, "random_output_len": 64}
# With its 441 tokens a picture of llava-0.5b makes a prompt of about 480, and of qwen2-vl-small with 144 one of 185.
_IMAGE = {
    "backend": "openai-chat",
    "images": 1,
    "image_size": "336x336",
    "random_input_len": 24,
    "random_output_len": 32,
}
_TOY = {"random_input_len": 32, "random_output_len": 128}


Workload = tuple[str, dict[str, Any]]


def _workload(shape: str, values: dict[str, Any], streams: int, rounds: int) -> Workload:
    what = f"{shape}, {streams} stream{'s' if streams > 1 else ''}"
    return what, {**values, "streams": streams, "rounds": rounds}


# `streams` requests at a time, `rounds` times as many in all.
WORKLOADS: dict[str, Workload] = {
    "text-1": _workload("263 in, 64 out", _TEXT, 1, 8),
    "text-8": _workload("263 in, 64 out", _TEXT, 8, 4),
    "text-32": _workload("263 in, 64 out", _TEXT, 32, 3),
    "prefix-8": _workload(
        "1,024 shared and 42 own in, 32 out",
        {"random_prefix_len": 1024, "random_input_len": 42, "random_output_len": 32},
        8,
        6,
    ),
    "image-1": _workload("a new picture, 32 out", _IMAGE, 1, 8),
    "image-4": _workload("a new picture, 32 out", _IMAGE, 4, 5),
    "image-16": _workload("a new picture, 32 out", _IMAGE, 16, 3),
    "image-repeat": _workload(
        "always the same picture, 32 out", {**_IMAGE, "repeat_images": True}, 8, 6
    ),
    "toy-1": _workload("32 in, 128 out", _TOY, 1, 10),
    "toy-32": _workload("32 in, 128 out", _TOY, 32, 10),
    "toy-one-token": _workload("32 in, 1 out", {**_TOY, "random_output_len": 1}, 32, 40),
}


def main(arguments: list[str]) -> int:
    """Prints a row for each workload as it ends. Returns 1 if one failed."""
    told = parser().parse_args(arguments)
    earlier = json.loads(told.against.read_text()) if told.against else {}
    print(
        f"{'workload':<14}{'tokens/s':>10}{'TTFT ms':>10}{'P99':>9}{'TPOT ms':>10}{'ITL P99':>10}"
    )
    rows: dict[str, dict[str, Any]] = {}
    failed = False
    for name in told.workloads or WORKLOADS:
        try:
            _, result, _ = uvloop.run(measure(settings_of(name, told)))
        except BenchError as error:
            print(f"{name:<14}{error}", flush=True)
            failed = True
            continue
        failed |= bool(result.failed)
        rows[name] = result.to_json()
        print(row(name, result) + ratio(rows[name], earlier.get(name)), flush=True)
    if told.output:
        told.output.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


def settings_of(name: str, told: argparse.Namespace) -> BenchSettings:
    """Arguments of `tessera bench serve` for a workload."""
    values = dict(WORKLOADS[name][1])
    streams, rounds = values.pop("streams"), values.pop("rounds")
    return BenchSettings(
        base_url=told.base_url,
        model=told.model,
        tokenizer=told.tokenizer,
        prompts="words" if told.words else "auto",
        max_concurrency=streams,
        seed=told.seed,
        num_prompts=max(told.least, round(streams * rounds * told.scale)),
        num_warmups=min(streams, 2),
        disable_tqdm=not sys.stderr.isatty(),
        **values,
    )


def row(name: str, result: Result) -> str:
    """Tokens a second, median and P99 of the first token, mean per output token, P99 between tokens."""
    ttft, tpot = result.latencies["ttft"], result.latencies["tpot"]
    # Between events, not tokens: a server that joins tokens in one event must not look smoother.
    itl = result.latencies["gap"].percentiles[99]
    failed = f"   {result.failed} FAILED" if result.failed else ""
    return (
        f"{name:<14}{result.output_tokens_per_s:>10.1f}{1000 * ttft.median:>10.1f}"
        f"{1000 * ttft.percentiles[99]:>9.1f}{1000 * tpot.mean:>10.2f}{1000 * itl:>10.1f}{failed}"
    )


def ratio(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """How many times the tokens a second of an earlier run; empty if it had no such row."""
    if not before or not before.get("output_throughput"):
        return ""
    return f"   x {now['output_throughput'] / before['output_throughput']:.2f}"


def parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<14}{what}" for name, (what, _) in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        prog="compare",
        description=__doc__,
        epilog=f"workloads (all unless named):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("workloads", nargs="*", metavar="workload")
    add("--base-url", default="http://127.0.0.1:8000")
    add("--model", default="", help="the only one served unless given")
    add("--tokenizer", type=Path, help="checkpoint folder: makes prompts of words exact")
    add("--words", action="store_true", help="for a server that takes no token ids")
    add("--seed", type=int, default=0, help="another one for prompts that no cache has seen")
    add("--scale", type=float, default=1.0, help="more or fewer requests")
    add("--least", type=int, default=4, help="requests of a workload at least")
    add("--output", type=Path, help="file for the rows as JSON")
    add("--against", type=Path, help="such a file of an earlier run")
    return parser
