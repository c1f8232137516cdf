"""A file system that can be filled without harm to anybody else, and filling it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.load.errors import BenchError

_SIZE = "256m"
_PIECE_BYTES = 1 << 20
_FILLER = "filler"


class FullDisk:
    """The disk of a state folder."""

    def __init__(self, state: Path) -> None:
        self._filler = state / _FILLER

    def fill(self) -> None:
        """Writes until not one more byte fits."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            size = _PIECE_BYTES
            while size:
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Removes what was written."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts one in memory at `folder`, which is made. Raises BenchError where that is not allowed."""
    folder.mkdir(mode=0o700)
    options = f"size={_SIZE},mode=0700,uid={os.getuid()},gid={os.getgid()}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(
            f":full-disk needs a file system of its own, and mounting one failed: {done.stderr.strip()} "
            "(root may do it; leave :full-disk away otherwise)"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
