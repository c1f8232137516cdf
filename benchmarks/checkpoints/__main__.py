"""`python -m benchmarks.checkpoints text-0.5b /tmp/text-0.5b`: writes a checkpoint folder, or lists them."""

import sys
from pathlib import Path

from benchmarks.checkpoints.shapes import SHAPES


def main(arguments: list[str]) -> int:
    """Returns 2 where the name or the folder is missing."""
    if len(arguments) != 2 or arguments[0] not in SHAPES:
        print("usage: python -m benchmarks.checkpoints NAME FOLDER\n")
        for name, make in SHAPES.items():
            print(f"  {name:<16} {(make.__doc__ or '').splitlines()[0]}")
        return 2
    name, folder = arguments[0], Path(arguments[1])
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} is not empty", file=sys.stderr)
        return 2
    SHAPES[name](folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:,.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
