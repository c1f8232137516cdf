"""The command `tessera`."""

import difflib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from types import ModuleType

from shared.command_line import is_narrow, wrapped

_GROUPS = {
    "serve a model": {
        "serve": "serve a model on this machine: every service and a Redis of its own",
        "run": "ask about pictures in files, batch by batch",
        "run-batch": "answer a file of requests, by a server that runs or by services of its own",
    },
    "use one that is served": {
        "chat": "talk to it in the terminal, about pictures too",
        "why": "say where a request's time went, and what it waited for",
        "logs": "show the log lines about a request, of all services of this machine",
        "bench": "measure it, Tessera's or another's",
    },
    "look before": {
        "doctor": "look at this machine and say what is missing",
        "check": "say by whose code a model would be served, or why it cannot be",
        "profile": "measure the operations that a model's steps are made of",
        "version": "print the version",
    },
    "checkpoints": {
        "weights": "rewrite the names of a checkpoint's tensors",
        "convert": "make a checkpoint folder of a file of another program",
    },
}
_COMMANDS = [name for commands in _GROUPS.values() for name in commands]
# What one does, in the order in which one does it.
_FIRST = {
    "tessera serve": "serve the demo model; `tessera serve MODEL` your own",
    "tessera chat": "talk to it in the terminal, with --image about a picture",
    "tessera doctor": "look at this machine and say what is missing",
    "tessera check MODEL": "say whether a model can be served, and by whose code",
    "tessera bench serve": "measure what is served",
}
# Where a command is no module of the launcher with its name.
_MODULES = {
    "bench": "benchmarks.load.command",
    "doctor": "services.launcher.doctor.command",
    "profile": "services.decoder.profile",
    "run": "services.launcher.run.command",
    "serve": "services.launcher.serve_command",
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
    if not arguments:
        print(_first_things())
        return 0
    if arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    name, *rest = arguments
    if name in ("version", "--version", "-V"):
        print(f"tessera {version()}")
        return 0
    if name not in _COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return 2
    try:
        _help(name, rest)
        command = _load(name)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(command.main(rest))  # which may import more
    except ModuleNotFoundError as error:
        print(f"tessera: {_remedy(error)}", file=sys.stderr)
        return 1


def version() -> str:
    """The installed version; "0+source" for a tree that is not installed."""
    import importlib.metadata  # slow: no command waits for it but this one

    try:
        return importlib.metadata.version("tessera-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def _help(name: str, arguments: list[str]) -> None:
    """Prints a command's options and exits, if they are asked for and all that is needed are its settings."""
    asked = [word for word in arguments if word in ("-h", "--help", "--help-all")]
    if not asked:
        return
    words = f"{name} {arguments[0]}" if f"{name} {arguments[0]}" in _SETTINGS else name
    if words in _SETTINGS:
        module, _, settings = _SETTINGS[words].partition(":")
        getattr(importlib.import_module(module), settings).load(asked[:1], prog=f"tessera {words}")


def _load(name: str) -> ModuleType:
    """The command's module, imported only now: each has its own libraries, some of them slow."""
    from shared.settings import set_process_environment

    # Read by gRPC when it is imported: what we start calls no gRPC between fork and exec.
    set_process_environment(GRPC_ENABLE_FORK_SUPPORT="0", GRPC_VERBOSITY="ERROR")
    gc.disable()  # what imports make lives on
    try:
        return importlib.import_module(_MODULES.get(name, f"services.launcher.{name}"))
    finally:
        gc.freeze()
        gc.enable()


def _remedy(error: ModuleNotFoundError) -> str:
    """What is missing, and the command that installs it."""
    missing = (error.name or "").split(".")[0]
    if missing == "tessera":
        return "the generated protos are missing: run `make proto`"
    return f"the Python package {missing} is missing: run `pip install -c constraints.txt -e '.[local]'`"


def _first_things() -> str:
    about = "Tessera serves vision-language models as small services around a queue."
    return "\n\n".join([wrapped(about), _rows(_FIRST), wrapped(_MORE)])


def _usage() -> str:
    groups = [f"{title}:\n{_rows(commands)}" for title, commands in _GROUPS.items()]
    return "\n\n".join(["usage: tessera COMMAND [options]", *groups, wrapped(_MORE)])


_MORE = "`tessera --help` lists the commands, `tessera COMMAND --help` the options of one."


def _rows(rows: Mapping[str, str]) -> str:
    """Names with what they do beside them, or below them where the terminal is narrow."""
    width = max(map(len, rows))
    if is_narrow():
        return "\n".join(
            f"  {name}\n{wrapped(f'      {text}', '      ')}" for name, text in rows.items()
        )
    indent = " " * (width + 4)
    return "\n".join(wrapped(f"  {name:<{width}}  {text}", indent) for name, text in rows.items())


def _unknown(name: str) -> str:
    alike = difflib.get_close_matches(name, _COMMANDS, 1)
    meant = f"; did you mean {alike[0]!r}?" if alike else ""
    return f"tessera: no command {name!r}{meant}\n`tessera --help` lists the commands."
