"""`python -m benchmarks.simulator --help`"""

import sys

from benchmarks.simulator.command import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
