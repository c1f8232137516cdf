"""`tessera serve` for one parent process: ends when that does, and leaves nothing behind.

A program of its own: `python -m services.launcher.offline.engine.system PARENT STATE_FOLDER <arguments of serve>`.
"""

import os
import shutil
import signal
import sys
import threading
import time

from shared.settings import set_process_environment

_LOOK_S = 0.25


def main() -> int:
    """Serves until SIGTERM, or until the parent process has ended; the exit status of `tessera serve`."""
    parent, folder, *arguments = sys.argv[1:]
    # The kernel's own signal for this (PR_SET_PDEATHSIG) comes when the thread ends that started the process.
    watching = threading.Thread(target=_end_with, args=(int(parent),), daemon=True)
    watching.start()
    # Read by gRPC when it is imported: what is started calls no gRPC between fork and exec.
    set_process_environment(GRPC_ENABLE_FORK_SUPPORT="0", GRPC_VERBOSITY="ERROR")
    from services.launcher import serve_command

    status = serve_command.main([*arguments, f"--state-dir={folder}"])
    if os.getppid() != int(parent):
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
