"""`tessera convert flm SRC DST`: the folder of a checkpoint made of a file of FastLLM."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.checkpoint.conversion.flm.convert import DTYPES, convert_flm
from shared.errors import ServingError


def main(arguments: Sequence[str]) -> int:
    """Returns 1, with one line that says why, for what cannot be converted."""
    parser = argparse.ArgumentParser(prog="tessera convert", description=__doc__)
    commands = parser.add_subparsers(required=True)
    flm = commands.add_parser("flm", help=__doc__)
    flm.add_argument("source", type=Path, help="a file that ends in .flm")
    flm.add_argument("destination", type=Path, help="a folder that is made")
    flm.add_argument("--dtype", choices=DTYPES, help="of the weights; unless most of the file's")
    flm.add_argument(
        "--keep-codes",
        action="store_true",
        help="layers of 8 or 4 bits stay so, as compressed-tensors has them, and take as little memory",
    )
    options = parser.parse_args(arguments)
    try:
        convert_flm(
            options.source, options.destination, options.dtype, keep_codes=options.keep_codes
        )
    except (ServingError, OSError) as error:
        print(f"tessera convert: {error}", file=sys.stderr)
        return 1
    return 0
