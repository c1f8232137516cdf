"""Environments of Python and of node, each with one client, kept between runs below `build/clients`."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "clients"
_PROGRAMS = Path(__file__).parent / "programs"
# Written when all is installed: what is without it was interrupted.
_DONE = ".installed"
_UV = Path(sys.executable).with_name("uv")


def python_program(name: str, requirements: Sequence[str]) -> list[str]:
    """The command that runs `programs/ask_<name>.py` where `requirements` are installed, and nothing else is. Skips
    the test where PyPI cannot be reached."""
    if not requirements:
        return [sys.executable, str(_PROGRAMS / f"ask_{name}.py")]
    folder = _folder(name, requirements)
    python = folder / "bin" / "python"
    if not (folder / _DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run([_UV, "venv", "--quiet", "--python", sys.executable, folder])
        _install([_UV, "pip", "install", "--quiet", "--python", python], requirements, "PyPI")
        (folder / _DONE).touch()
    return [str(python), str(_PROGRAMS / f"ask_{name}.py")]


def node_program(name: str, requirements: Sequence[str]) -> list[str]:
    """The command that runs `programs/ask_<name>.mjs` likewise. Skips the test where there is no node with npm, or
    npm's registry cannot be reached."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there are no node and npm here")
    folder = _folder(name, requirements)
    if not (folder / _DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        quiet = ["--silent", "--no-audit", "--no-fund"]
        _install(["npm", "install", *quiet, "--prefix", folder], requirements, "npm")
        (folder / _DONE).touch()
    # Modules are looked for beside the program that names them.
    for program in (f"ask_{name}.mjs", "asked.mjs"):
        shutil.copy(_PROGRAMS / program, folder)
    return ["node", str(folder / f"ask_{name}.mjs")]


def _folder(name: str, requirements: Sequence[str]) -> Path:
    """Another one for other requirements, or another Python."""
    key = "\n".join([*requirements, sys.version])
    return _FOLDER / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _install(command: Sequence[str | Path], requirements: Sequence[str], registry: str) -> None:
    done = _run([*command, *requirements], check=False)
    if done.returncode == 0:
        return
    if not _reachable(registry):
        pytest.skip(f"{registry} cannot be reached: {done.stderr.strip().splitlines()[-1:]}")
    pytest.fail(f"{' '.join(map(str, done.args))}:\n{done.stdout}{done.stderr}")


@functools.cache
def _reachable(registry: str) -> bool:
    """Whether it knows a package that it has for certain."""
    asked: dict[str, list[str | Path]] = {
        "PyPI": [_UV, "pip", "install", "--dry-run", "--refresh", "--reinstall", "pip", "--python", sys.executable],
        "npm": ["npm", "view", "npm", "version", "--prefer-online"],
    }  # fmt: skip
    return _run(asked[registry], check=False).returncode == 0


def _run(command: Sequence[str | Path], check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "UV_CACHE_DIR": str(_FOLDER / "downloads")}
    return subprocess.run(
        command, capture_output=True, text=True, check=check, timeout=600, env=environment
    )
