"""Makes the state folder, which holds users' requests, private to its owner."""

import os
import stat
from pathlib import Path

from shared.errors import Unavailable

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# What this program and its Redis write there. The mode of a folder with anything else is not changed.
_OWN_FILES = {"lock", "processes.json", "processes.tmp", "redis.log", "logs"}
_OWN_PREFIXES = ("appendonly", "temp-", "dump")


def make_private(folder: Path) -> int:
    """Makes the folder with mode 0700, or gives one that is there that mode. Returns the mode that it had if others
    could enter it, else 0.

    Raises Unavailable, with what to do, if it is somebody else's, or holds files that are not ours, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise _refusal(f"cannot use {folder}: {error.strerror}", "give another") from error
    if found.st_uid != os.getuid():
        raise _refusal(
            f"{folder} belongs to user {found.st_uid}, who could read what users asked",
            f"chown it to user {os.getuid()}, or give another",
        )
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS:
        return 0
    remedy = f"chmod 700 {folder}, or give another"
    if foreign := _foreign(folder):
        raise _refusal(
            f"others may enter {folder} (mode {mode:04o}), and it holds what is not ours: {foreign}",
            remedy,
        )
    folder.chmod(0o700)
    if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:  # a file system without modes
        raise _refusal(f"others may enter {folder} (mode {mode:04o}), and it stays so", remedy)
    return mode


def _foreign(folder: Path) -> str:
    """An entry that neither we nor our Redis made; empty for none."""
    for entry in sorted(folder.iterdir()):
        own_name = entry.name in _OWN_FILES or entry.name.startswith(_OWN_PREFIXES)
        if not own_name or entry.lstat().st_uid != os.getuid():
            return entry.name
    return ""


def _refusal(fault: str, remedy: str) -> Unavailable:
    return Unavailable("STATE_FOLDER", f"the state folder: {fault}: {remedy} by --state-dir")
