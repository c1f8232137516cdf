"""A prewarmed process of a service: imports all that the service needs, waits, and runs the service when activated.

A program of its own, run by its path: `prewarmed_process.py services.decoder`. A byte on its input activates it; it
ends when its input closes before that. Imports take most of a service's start, and the memory for them does not grow
with the model.
"""

import contextlib
import importlib
import os
import pkgutil
import runpy
import sys

PREWARMED = b"the process is prewarmed\n"


def main(package: str) -> None:
    """Returns when the service has ended, or when the process was never activated."""
    _import_all(package)
    os.write(1, PREWARMED)
    if not os.read(0, 1):
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = [package]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


def _import_all(package: str) -> None:
    """Imports every module of the service and so its libraries; what cannot be imported here is not used here."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
        if not module.name.endswith(".__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)


if __name__ == "__main__":
    main(sys.argv[1])
