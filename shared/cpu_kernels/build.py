"""Compiles the CPU kernels: `python shared/cpu_kernels/build.py [--all]`; `--self-test` tries them out.

Once for each instruction set, so that an image runs on any machine. Without a compiler there are no kernels, and torch
does their work. Nothing but the standard library is needed here, so that images compile them first of all.
"""

import argparse
import sys
from pathlib import Path

# A script finds only what lies beside it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.cpu_kernels import choice, compiling, instruction_sets, self_testing
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS


def main() -> None:
    """Compiles what this machine needs, or everything for an image that will run elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="for every instruction set")
    parser.add_argument("--status", action="store_true", help="only say what there is")
    parser.add_argument(
        "--self-test", action="store_true", help="try them; with --all those of other machines, too"
    )
    arguments = parser.parse_args()
    if arguments.self_test:
        tried = INSTRUCTION_SETS if arguments.all else choice.runnable_instruction_sets()[:1]
        wrong = [known.name for known in tried if not self_testing.self_test(known)]
        sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)
    every = arguments.all
    sets = instruction_sets.of_this_architecture() if every else choice.runnable_instruction_sets()
    if not sets:
        print("none for this processor")
    elif arguments.status:
        print(choice.status())
    elif compiling.compiler() is None:
        print("not compiled: there is no C++ compiler (install g++ or clang++)")
    else:
        for known in sets:
            print(compiling.find(known) or compiling.compile_library(known))


if __name__ == "__main__":
    main()
