"""Child processes in which a library prints when it is imported, as torch_npu does where CANN is not set up."""

from pathlib import Path

import pytest

from shared.settings import python_path

LINE = "Warning: ASCEND_HOME_PATH environment variable is not set."


def make_loud(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python process that is started from now on prints a line first. `folder` does not exist yet."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"print({LINE!r}, flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", python_path(folder))
