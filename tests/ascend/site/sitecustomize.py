"""Every Python process with this folder on its PYTHONPATH gets the simulated NPU when it imports torch_npu."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class SimulatorFinder(importlib.abc.MetaPathFinder):
    """Finds torch_npu as ever, also for those who only ask whether it is there, and installs the simulator once it has
    been imported."""

    _is_asking_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all other modules."""
        if fullname != "torch_npu" or self._is_asking_others:
            return None
        self._is_asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking_others = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_install(module: ModuleType) -> None:
                load(module)
                importlib.import_module("tests.ascend.simulator.install")

            spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def run_the_next() -> None:
    """Runs the sitecustomize that this one hides, if there is one."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, SimulatorFinder())
if "FAKE_NPU_BREAK" in os.environ:
    # Other programs of a test whose code is broken have the same fault.
    importlib.import_module("tests.ascend.breaks.hook").install(os.environ["FAKE_NPU_BREAK"])
run_the_next()
