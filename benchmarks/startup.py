"""Seconds from `tessera serve` to ready, with the demo model."""

import argparse
import time

from support.system import System


def main(arguments: list[str]) -> None:
    """Prints each start and the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    seconds = []
    for _ in range(parser.parse_args(arguments).repeats):
        began = time.perf_counter()
        with System():
            seconds.append(time.perf_counter() - began)
        print(f"ready after {seconds[-1]:.1f} s")
    print(f"best {min(seconds):.1f} s")
