"""The command `tessera serve`: what the services need is imported while the launcher imports what it needs itself."""

import gc

from services.launcher.service_environment import fork_environment, usual_groups
from services.launcher.supervise.fork_servers import ForkServers


def main(arguments: list[str]) -> int:
    """Serves until a signal. Returns the exit status: 0, or 1 when it could not."""
    with ForkServers(usual_groups(), fork_environment()) as fork_servers:
        gc.disable()  # what imports make lives on
        try:
            from services.launcher import serve
        finally:
            gc.freeze()
            gc.enable()
        return serve.main(arguments, fork_servers)
