"""`tessera weights strip-infix SRC DST`: a copy of a checkpoint with a part taken out of the names of its tensors."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.checkpoint.conversion.strip_infix import strip_infix
from shared.errors import ServingError

_INFIX = "original_linear."  # what partial LoRA's linear layers have in released checkpoints


def main(arguments: Sequence[str]) -> int:
    """Returns 1, with one line that says why, for what cannot be copied."""
    parser = argparse.ArgumentParser(prog="tessera weights", description=__doc__)
    commands = parser.add_subparsers(required=True)
    strip = commands.add_parser("strip-infix", help=__doc__)
    strip.add_argument("source", type=Path, help="folder of a checkpoint")
    strip.add_argument("destination", type=Path, help="a folder that is made")
    strip.add_argument("--infix", default=_INFIX, type=_text, help=f"unless {_INFIX}")
    options = parser.parse_args(arguments)
    try:
        strip_infix(options.source, options.destination, options.infix)
    except (ServingError, OSError) as error:
        print(f"tessera weights: {error}", file=sys.stderr)
        return 1
    return 0


def _text(value: str) -> str:
    """Raises ValueError for nothing."""
    if not value:
        raise ValueError
    return value
