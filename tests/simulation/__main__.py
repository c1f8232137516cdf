"""`python -m tests.simulation`: runs seeds, or one of them with all that happened."""

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "protos"), str(_ROOT / "tests")]


def main() -> int:
    """Exit status 1 if an invariant was broken."""
    from tests.simulation.planted import PLANTED, planted
    from tests.simulation.world import simulate

    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--trace", action="store_true", help="with everything that happened")
    parser.add_argument("--seeds", type=int, default=100, help="how many runs, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--planted", choices=sorted(PLANTED), help="with a deliberate fault")
    parser.add_argument("--digest", action="store_true", help="prints the digest of each run")
    options = parser.parse_args()
    seeds = (
        [options.seed]
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    gc.freeze()
    began, failed, faults, tokens = time.perf_counter(), 0, Counter[str](), 0
    for seed in seeds:
        with planted(options.planted):
            outcome = simulate(seed, keep_trace=options.trace)
        faults += Counter(outcome.faults)
        tokens += outcome.tokens
        if options.trace:
            print("\n".join(outcome.trace))
        if options.digest:
            print(seed, outcome.digest)
        if outcome.failures:
            failed += 1
            print(
                f"seed {seed}: {len(outcome.failures)} broken; python -m tests.simulation --seed {seed} --trace"
            )
            for failure in outcome.failures[:5]:
                print(f"    {failure}")
            sys.stdout.flush()
    seconds = time.perf_counter() - began
    print(
        f"{len(seeds)} runs in {seconds:.1f} s, {failed} broken, {tokens} tokens, faults: {dict(faults)}"
    )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
