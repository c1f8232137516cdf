"""`tessera logs REQUEST_ID`: the log lines about a request, of all processes of the systems on this machine."""

import re
import sys
from pathlib import Path

from services.launcher.settings import LogsSettings, log_folders
from services.launcher.state.log_files import LogLine, lines_about

# As the header x-tessera-request-id has it, or as the id of an answer, with the prefix of its API.
_NAME = re.compile(r"(?:[a-z]+[_-])?(r_[0-9a-f]{8}_[0-9a-f]{32})")


def main(arguments: list[str]) -> int:
    """Prints the lines by time. Returns 0, or 1 if there are none."""
    settings = LogsSettings.load(arguments, prog="tessera logs")
    folders = log_folders(settings.state_dir)
    lines = lines_of_all(folders, own_name(settings.request_id) or settings.request_id)
    if not lines:
        where = ", ".join(map(str, folders)) or "no folder of a `tessera serve` of this user"
        print(
            f"tessera logs: nothing about {settings.request_id} in {where}: lines are kept there until 16 MB of newer"
            " ones of the same process have come (--state-dir names another system's folder)",
            file=sys.stderr,
        )
        return 1
    width = max(len(line.process) for line in lines)
    for line in lines:
        print(f"{line.at}  {line.process:<{width}} | {line.text}")
    return 0


def own_name(request_id: str) -> str | None:
    """The name that logs have for a request, of that or of the id of its answer; None for a name that a client gave."""
    found = _NAME.fullmatch(request_id)
    return found and found[1]


def lines_of_all(folders: list[Path], request_id: str) -> list[LogLine]:
    """The lines about a request in several systems' folders, by time."""
    found = [line for folder in folders for line in lines_about(folder, request_id)]
    return sorted(found, key=lambda line: line.at)
