"""What the environments of all services have in common, and the process that imports their libraries has too."""

from pathlib import Path

from services.launcher.supervise.fork_servers import Group
from shared.hardware import ascend
from shared.settings import child_environment, python_path, unless_set

_ROOT = Path(__file__).parents[2]
PATHS = (_ROOT, _ROOT / "protos")

# Services that start processes need no fork handlers of gRPC: those processes never call it.
# Without the event engine one thread of a process watches all its sockets instead of several that wake each other: half
# of what gRPC costs beside the event loop for each message (`benchmarks/README.md`).
QUIET_GRPC = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_VERBOSITY": "ERROR",
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}

# What services set before they import their libraries, where another program imports those before it runs a service.
LIBRARIES = {
    "GOMP_SPINCOUNT": "10000",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    **ascend.ENVIRONMENT,
}

# Variables that may hold API keys.
KEY_VARIABLES = (
    "TESSERA_API_KEY",
    "TESSERA_GATEWAY_API_KEY",
    "TESSERA_TENANT_WEIGHTS",
    "TESSERA_GATEWAY_TENANT_WEIGHTS",
)


def threads_of_libraries(threads: int) -> dict[str, str]:
    """The variables that give libraries so many threads; 0 leaves it to them."""
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


def usual_groups(threads: int = 0) -> list[Group]:
    """The services that compute, with so many threads for their libraries, and the others."""
    return [
        Group(["decoder", "vision_encoder"], threads_of_libraries(threads)),
        Group(["preprocess", "scheduler", "gateway"], threads_of_libraries(1)),
    ]


def fork_environment() -> dict[str, str]:
    """Of the processes that import libraries and fork services."""
    # Threads of numpy's library would keep a process from being forked; the services have no use for them.
    libraries = unless_set(**LIBRARIES, OPENBLAS_NUM_THREADS="1")
    path = python_path(*PATHS)
    return child_environment(*KEY_VARIABLES, PYTHONPATH=path, **QUIET_GRPC, **libraries)
