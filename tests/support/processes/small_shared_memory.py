"""Programs for which /dev/shm is a small file system of their own, in a mount namespace."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'


def with_shared_memory(size: str, program: Sequence[str]) -> list[str]:
    """The command that runs `program` where /dev/shm has `size` ("8m"). Skips the test, with a line, where this machine
    gives no such namespace.
    """
    command = [shutil.which("unshare") or "unshare", "--mount", "sh", "-c", _MOUNT, "sh", size]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        problem = tried.stderr.strip() if tried.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        reason = f"no mount namespace with a small /dev/shm: {problem}"
        print(reason, file=sys.stderr)
        pytest.skip(reason)
    return [*command, *program]
