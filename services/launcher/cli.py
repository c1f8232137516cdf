"""The command `tessera`."""

import importlib
import os
import signal
import sys
from types import ModuleType

_COMMANDS = {
    "serve": "serve a model on this machine: every service and a Redis of its own",
    "run": "ask about pictures in files, batch by batch",
    "run-batch": "answer a file of requests, by a server that runs or by services of its own",
    "chat": "talk to a served model in the terminal, about pictures too",
    "why": "say where a request's time went, and what it waited for",
    "logs": "show the log lines about a request, of all services of this machine",
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
    "run": "services.launcher.run.command",
    "run-batch": "services.launcher.run_batch.command",
    "weights": "shared.checkpoint.conversion.weights_command",
    "convert": "shared.checkpoint.conversion.convert_command",
}
# Settings of the commands whose modules need generated protos: `--help` is written without those.
_SETTINGS = {
    "serve": "services.launcher.settings:ServeSettings",
    "chat": "services.launcher.settings:ChatSettings",
    "run": "services.launcher.run.settings:RunSettings",
    "run-batch": "services.launcher.settings:RunBatchSettings",
    "check": "services.launcher.settings:CheckSettings",
    "why": "services.launcher.settings:WhySettings",
    "logs": "services.launcher.settings:LogsSettings",
    "profile": "services.decoder.profile_settings:ProfileCommandSettings",
    "bench serve": "benchmarks.load.settings:BenchSettings",
    "bench kill": "benchmarks.kill.settings:KillSettings",
}
# What shells expect of a process that ended by these signals.
_INTERRUPTED = 128 + 2
_PIPE_CLOSED = 128 + 13


def main() -> None:
    """Runs one command and exits with its status; quietly where the reader of its output has left or Ctrl-C ends it."""
    # While libraries are imported Ctrl-C ends the process by the signal itself, without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        try:
            status = run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # At its end Python flushes what is left, once more into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _PIPE_CLOSED
    except KeyboardInterrupt:
        status = _INTERRUPTED
    sys.exit(status)


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
        _help(name, rest)
        command = _load(name)
    except ModuleNotFoundError as error:
        print(f"tessera: {_remedy(error)}", file=sys.stderr)
        return 1
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = command.main(rest)
    return status


def version() -> str:
    """The installed version; "0+source" for a tree that is not installed."""
    import importlib.metadata  # slow: no command waits for it but this one

    try:
        return importlib.metadata.version("tessera-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def _help(name: str, arguments: list[str]) -> None:
    """Prints a command's options and exits, if they are asked for and all that is needed are its settings."""
    if not {"-h", "--help"} & set(arguments):
        return
    words = f"{name} {arguments[0]}" if f"{name} {arguments[0]}" in _SETTINGS else name
    if words in _SETTINGS:
        module, _, settings = _SETTINGS[words].partition(":")
        getattr(importlib.import_module(module), settings).load(["--help"], prog=f"tessera {words}")


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
