"""A spare process of a room: imports all that the room needs, waits until it is wanted, and is the room from then on.

A program of its own, run by its path: `held.py services.decoder`. It is wanted when a byte comes on its input, and
ends when that closes. Libraries are most of what a room's start takes, and no memory that grows with the model.
"""

import contextlib
import importlib
import os
import pkgutil
import runpy
import sys

READY = b"the spare is ready\n"


def main(package: str) -> None:
    """Returns when the room has ended, or when it was never wanted."""
    _import_all(package)
    os.write(1, READY)
    if not os.read(0, 1):
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = [package]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


def _import_all(package: str) -> None:
    """Every module of the room, and with them their libraries; what cannot be imported here is not used here."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
        if not module.name.endswith(".__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)


if __name__ == "__main__":
    main(sys.argv[1])
