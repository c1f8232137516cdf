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
            in_portable = filter(None, map(instruction_sets.portable, INSTRUCTION_SETS))
            tried = (*INSTRUCTION_SETS, self_testing.with_emulated_tiles(), *in_portable)
        wrong = self_testing.wrong_sets(tried)
        sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)
    asked, folder, portable = _settings()
    if arguments.status:
        _say(asked, folder, portable)
    elif compiling.compiler() is None:
        print(f"not compiled: {compiling.NO_COMPILER}")
    elif arguments.all:
        sets = instruction_sets.all_of_this_architecture()
        failed = compiling.compile_missing(sets)
        for known in sets:
            print(compiling.find(known) or f"{known.label}: {compiling.reason(failed[known])}")
        sys.exit(1 if failed else 0)
    elif named := instruction_sets.named_by_processor(in_portable=portable):
        choice.choose("", folder, portable=portable)
        made = [path for known in named if (path := compiling.find(known))]
        print(*made, sep="\n")
        _say(asked, folder, portable)
        sys.exit(0 if made else 1)
    else:
        print("none for this processor")


def _say(asked: str, folder: Path | None, portable: bool) -> None:
    try:
        print(choice.status(asked, folder, portable=portable))
    except ValueError as error:
        sys.exit(str(error))


def _settings() -> tuple[str, Path | None, bool]:
    """Which set services are told to take, where they keep what the trial finds, and whether in portable arithmetic."""
    try:
        from shared.settings import cpu_arithmetic_is_portable, cpu_instructions, cpu_trial_folder
    except ModuleNotFoundError:  # a Python without the libraries that settings need
        return "", None, False
    return cpu_instructions(), cpu_trial_folder(), cpu_arithmetic_is_portable()


if __name__ == "__main__":
    main()
