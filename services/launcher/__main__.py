"""`python -m services.launcher serve`: the command `tessera` for a tree that is not installed."""

import sys
from pathlib import Path

from services.launcher.cli import main

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "protos"))
    main()
