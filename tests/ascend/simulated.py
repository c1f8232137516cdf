"""`python -m tests.ascend.simulated [--npu 910B4] [--devices 1] program argument ...` becomes a program that finds
simulated NPUs, such as `tessera serve` (`make simulate-npu`). It prepares them first, as `environment.py` for tests.
"""

import argparse
import os
import sys

from tests.ascend.environment import CHIPS, npu_environment, prepare


def main(arguments: list[str]) -> int:
    """Returns 1 where there can be no simulated NPU, and says why."""
    parser = argparse.ArgumentParser(prog="python -m tests.ascend.simulated")
    parser.add_argument("--npu", choices=CHIPS, default=CHIPS[0], help="the chip")
    parser.add_argument("--devices", type=int, default=1, help="how many there are")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    if not given.command:
        parser.error("no program is given")
    if problem := prepare():
        print(f"There can be no simulated NPU: {problem}.", file=sys.stderr)
        return 1
    sys.stdout.flush()
    environment = npu_environment(given.npu, devices=given.devices)
    os.execvpe(given.command[0], given.command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
