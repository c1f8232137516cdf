"""The folders of one running instance: those that are kept, and those that are removed with it."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from services.launcher.state.state_folder import make_private
from shared.errors import Unavailable
from shared.settings import temporary_folder

_LONGEST_SOCKET_NAME = 30
_LONGEST_SOCKET_PATH = 99  # bytes; the kernel's limit is 107


class Folders:
    """State (kept), sockets and artifacts (both removed at the end), named after the state folder.

    One instance owns them: it has the lock in the state folder while the block is entered. What a killed instance left
    is removed when the next one enters.
    """

    def __init__(self, state: Path, shared_memory: Path = Path("/dev/shm")) -> None:
        self.state = state
        name = hashlib.blake2b(str(state.resolve()).encode(), digest_size=4).hexdigest()
        name = f"tessera-{os.getuid()}-{name}"
        memory = shared_memory if shared_memory.is_dir() else temporary_folder()
        self.artifacts = memory / f"{name}"
        self.sockets = _short(temporary_folder()) / f"{name}.sockets"
        self.was_open = 0  # the state folder's mode, if others could read it until now
        self._lock: int | None = None

    def socket(self, name: str) -> Path:
        """Path of a unix socket, short enough for the kernel."""
        return self.sockets / f"{name}.sock"

    def heartbeat(self, name: str) -> Path:
        """Path of the unix socket on which a process answers probes."""
        return self.sockets / f"{name}.beat"

    def __enter__(self) -> Self:
        """Takes the lock and makes the folders.

        Raises Unavailable if another instance has them, or the state folder is not private.
        """
        self.was_open = make_private(self.state)
        self._lock = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._clear()
            for folder in (self.sockets, self.artifacts):
                folder.mkdir(mode=0o700)
        except BlockingIOError:
            os.close(self._lock)
            raise Unavailable(
                "STATE_IN_USE",
                f"another `tessera serve` uses {self.state}: end it, or give --state-dir",
            ) from None
        except FileExistsError as error:  # another user's, or it could not be removed
            os.close(self._lock)
            raise Unavailable(
                "FOLDER_IN_USE", f"{error.filename} belongs to somebody else: remove it"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()
        if self._lock is not None:
            os.close(self._lock)

    def _clear(self) -> None:
        for folder in (self.sockets, self.artifacts):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _short(folder: Path) -> Path:
    """The folder itself if socket paths below it fit, else /tmp."""
    longest = (
        _LONGEST_SOCKET_PATH - _LONGEST_SOCKET_NAME - len("/tessera-4294967295-00000000.sockets")
    )
    return folder if len(bytes(folder)) <= longest else Path("/tmp")
