"""Protos that have changed since they were compiled are named, before a test imports them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.compiled_protos import changed_protos


def test_changed_and_new_protos_are_named(tmp_path: Path) -> None:
    for name, proto_s, module_s in [("old", 10, 20), ("changed", 20, 10), ("new", 10, None)]:
        (tmp_path / f"{name}.proto").touch()
        os.utime(tmp_path / f"{name}.proto", (proto_s, proto_s))
        if module_s is not None:
            (tmp_path / f"{name}_pb2.py").touch()
            os.utime(tmp_path / f"{name}_pb2.py", (module_s, module_s))
    assert changed_protos(tmp_path) == ["changed.proto", "new.proto"]


def test_pytest_stops_with_the_command_that_compiles_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import tests.support.compiled_protos as p\n"
        "p.changed_protos = lambda: ['some.proto']\n"
        "import tests.conftest\n"
    )
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:valkey",
            "-p",
            "no:cacheprovider",
            tmp_path,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'protos'}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 4
    assert (
        "some.proto changed since protos/ was compiled: run `make proto`" in run.stdout + run.stderr
    )
