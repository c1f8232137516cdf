"""The command `tessera`."""

import importlib
import importlib.metadata
import sys
from types import ModuleType

_COMMANDS = {
    "serve": "serve a model on this machine: every service and a Redis of its own",
    "chat": "talk to a served model in the terminal, about pictures too",
    "bench": "measure a served model, Tessera's or another's",
    "profile": "measure the operations that a model's steps are made of",
    "check": "say by whose code a model would be served, or why it cannot be",
    "doctor": "look at this machine and say what is missing",
    "weights": "rewrite the names of a checkpoint's tensors",
    "convert": "make a checkpoint folder of a file of another program",
    "version": "print the version",
}
# Where a command is no module of the launcher with its name.
_MODULES = {
    "bench": "benchmarks.load.command",
    "doctor": "services.launcher.doctor.command",
    "profile": "services.decoder.profile",
    "weights": "shared.checkpoint.conversion.weights_command",
    "convert": "shared.checkpoint.conversion.convert_command",
}


def main() -> None:
    """Runs one command and exits with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs `tessera <arguments>`; returns the exit status, 2 if there is no such command."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name in ("version", "--version", "-V"):
        print(f"tessera {version()}")
        return 0
    if name not in _COMMANDS:
        print(f"tessera: no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        command = _load(name)
    except ModuleNotFoundError as error:
        print(f"tessera: {_remedy(error)}", file=sys.stderr)
        return 1
    status: int = command.main(rest)
    return status


def version() -> str:
    """The installed version; "0+source" for a tree that is not installed."""
    try:
        return importlib.metadata.version("tessera-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def _load(name: str) -> ModuleType:
    """The command's module, imported only now: each has its own libraries, some of them slow."""
    from shared.settings import set_process_environment

    # Read by gRPC when it is imported: what we start calls no gRPC between fork and exec.
    set_process_environment(GRPC_ENABLE_FORK_SUPPORT="0", GRPC_VERBOSITY="ERROR")
    return importlib.import_module(_MODULES.get(name, f"services.launcher.{name}"))


def _remedy(error: ModuleNotFoundError) -> str:
    """What is missing, and the command that installs it."""
    missing = (error.name or "").split(".")[0]
    if missing == "tessera":
        return "the generated protos are missing: run `make proto`"
    return f"the Python package {missing} is missing: run `pip install -c constraints.txt -e '.[local]'`"


def _usage() -> str:
    rows = "\n".join(f"  {name:<9} {text}" for name, text in _COMMANDS.items())
    return (
        "usage: tessera <command> [options]\n\n"
        f"{rows}\n\n"
        "`tessera <command> --help` lists a command's options."
    )
