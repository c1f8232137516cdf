"""Compiles the CPU kernels: `python shared/cpu_kernels/build.py [--all]`; `--self-test` tries them out.

Once for each instruction set, so that an image runs on any machine. Without a compiler there are no kernels, and torch
does their work. Nothing but the standard library is needed here, so that images compile them first of all.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# A script finds only what lies beside it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.cpu_kernels import choice, compiling, instruction_sets, self_testing
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet


def main() -> None:
    """Compiles what this machine can use and tries which is best, or everything for an image that runs elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="for every instruction set, without a trial"
    )
    parser.add_argument("--status", action="store_true", help="only say which is used, and why")
    parser.add_argument(
        "--self-test", action="store_true", help="try them; with --all those of other machines, too"
    )
    arguments = parser.parse_args()
    if arguments.self_test:
        tried = choice.runnable_instruction_sets()[:1]
        if arguments.all:
            portable = filter(None, map(instruction_sets.portable, INSTRUCTION_SETS))
            tried = (*INSTRUCTION_SETS, *portable)
        wrong = self_testing.wrong_sets(tried)
        sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)
    if arguments.status:
        print(choice.status(keep_in=_given_folder()))
    elif compiling.compiler() is None:
        print(f"not compiled: {compiling.NO_COMPILER}")
    elif arguments.all:
        _compile(instruction_sets.all_of_this_architecture())
    elif named := instruction_sets.named_by_processor():
        _compile(named)
        print(choice.status(keep_in=_given_folder()))
    else:
        print("none for this processor")


def _compile(sets: Sequence[InstructionSet]) -> None:
    failed = compiling.compile_missing(sets)
    for known in sets:
        print(compiling.find(known) or f"{known.label}: {compiling.reason(failed[known])}")
    if len(failed) == len(sets):
        sys.exit(1)


def _given_folder() -> Path | None:
    """Where services keep what the trial finds."""
    try:
        from shared.settings import cpu_trial_folder
    except ModuleNotFoundError:  # a Python without the libraries that settings need
        return None
    return cpu_trial_folder()


if __name__ == "__main__":
    main()
