"""Modules are broken as they are imported: no file is written, and no other process notices."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from tests.ascend.breaks.entries import BREAKS
from tests.ascend.breaks.fault import Break


class _BrokenLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, fault: Break) -> None:
        super().__init__(name, path)
        self._fault = fault

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew: what is kept in __pycache__ is that of the file."""
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        return compile(self._fault.broken(text), path, "exec", dont_inherit=True)


class _BrokenFinder(importlib.abc.MetaPathFinder):
    def __init__(self, fault: Break) -> None:
        self._fault = fault

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all other modules."""
        if fullname != self._fault.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _BrokenLoader(fullname, spec.origin, self._fault)
        return spec


def install(reason: str) -> None:
    """Breaks what this process imports from now on; nothing for an empty reason."""
    if not reason:
        return
    fault = next(entry for entry in BREAKS if entry.reason == reason)
    assert fault.module not in sys.modules, f"{fault.module} has been imported already"
    sys.meta_path.insert(0, _BrokenFinder(fault))
