"""`--allowed-adapter-dir`: which folders adapters are loaded from while a system runs."""

import os
from pathlib import Path

from shared.errors import InvalidRequest
from shared.lora.adapter import WEIGHTS
from shared.lora.config import CONFIG


def allowed_folder(given: str, allowed: Path) -> Path:
    """The real path of an adapter's folder, which may be given below `allowed`. Raises InvalidRequest for one that is
    elsewhere, or whose files are, links followed, and for what is no folder."""
    try:
        root = allowed.resolve()
        folder = (root / given).resolve()
        files = [(folder / name).resolve() for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        raise _refused(given, "is no path") from None
    if folder == root or not all(path.is_relative_to(root) for path in (folder, *files)):
        raise _refused(given, "is not below --allowed-adapter-dir")
    if not os.path.isdir(folder):  # False for a name that is too long as well
        raise _refused(given, "is no folder there")
    return folder


def _refused(given: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        "ADAPTER_NOT_ALLOWED", f"lora_path: {given[:300]!r} {why}", field="lora_path"
    )
