"""Lists of the blocks that belong to a prompt: files in one folder, by names that clients choose."""

import re
import stat
from pathlib import Path

from shared.artifacts.mindie_shm import NAMES_FIELD, release_blocks
from shared.environment import unix_time
from shared.errors import InvalidRequest, Precondition

# Blocks are given back with their list when it is older: as long as raw media are kept for a prompt.
LIFETIME_S = 900.0
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class NameLists:
    """The lists in `folder`, of which every file is one."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises Precondition if it cannot be used."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder.resolve(strict=True)
        except OSError as error:
            raise Precondition("MINDIE_SHM", f"--mindie-shm {folder}: {error}") from error

    def path(self, name: str) -> Path:
        """The file of a list: a name alone, or with the folder before it. Raises InvalidRequest for any other path."""
        folder, _, last = name.rpartition("/")
        if not _NAME.fullmatch(last) or folder not in ("", str(self._folder)):
            raise InvalidRequest(
                "BAD_SHARED_MEMORY_LIST",
                f"{NAMES_FIELD} must name a file of the server's folder (--mindie-shm): up to 128 letters,"
                " digits, dots, dashes and underscores",
                field=NAMES_FIELD,
            )
        return self._folder / last

    def release_old(self) -> int:
        """Removes the lists older than LIFETIME_S and their blocks; returns how many. A file that is no list stays."""
        oldest, count = unix_time() - LIFETIME_S, 0
        for path in self._folder.iterdir():
            try:
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and found.st_mtime < oldest:
                    release_blocks(path)
                    count += 1
            except (OSError, InvalidRequest):
                continue
        return count
