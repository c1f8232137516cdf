"""`tessera why REQUEST_ID`: where a request's time went, as a waterfall in the terminal."""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

from services.launcher.logs import lines_of_all, own_name
from services.launcher.settings import WhySettings, log_folders
from services.launcher.state.log_files import LogLine
from shared.client import BlockingClient, ClientError, Refused
from shared.errors import InvalidRequest

_PROG = "tessera why"
_NOT_FOUND = 404
_KEPT = timedelta(minutes=10)
_NARROWEST = 20  # columns of the bars
_MOST_ROWS = 60
_PATIENCE_S = 5.0


def main(arguments: list[str]) -> int:
    """Returns 0, or 1 where there is no timeline: then it says why."""
    settings = WhySettings.load(arguments, prog=_PROG)
    query = f"?{urlencode({'user': settings.user})}" if settings.user else ""
    path = f"/v1/requests/{quote(settings.request_id, safe='')}/timeline{query}"
    try:
        with BlockingClient(
            [settings.url], api_key=settings.key, tls=settings.tls(), patience_s=_PATIENCE_S
        ) as client:
            timeline = client.get(path)
    except Refused as error:
        found = _explain(settings) if error.status == _NOT_FOUND else str(error)
        print(f"{_PROG}: {found}", file=sys.stderr)
        return 1
    except (ClientError, InvalidRequest, ValueError) as error:  # ValueError: --url is none
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 1
    print("\n".join(waterfall(timeline, shutil.get_terminal_size().columns)))
    return 0


def waterfall(timeline: Mapping[str, Any], columns: int) -> Iterator[str]:
    """The lines of a timeline, at most so many columns wide where that is possible."""
    total_ms = float(timeline["duration_ms"]) or 1.0
    at = datetime.fromtimestamp(timeline["started"], UTC).isoformat(timespec="milliseconds")
    yield f"{timeline['request_id']}  {timeline['model']}  {at.replace('+00:00', 'Z')}"
    yield timeline["text"]
    yield ""
    largest = timeline["largest"]["name"] if timeline["largest"] else ""
    spans = _shown(timeline["spans"])
    names = [f"{span['name']}{' *' if span['name'] == largest else ''}" for span in spans]
    whose = [_whose(span) for span in spans]
    left, right = max(map(len, names), default=0), max(map(len, whose), default=0)
    width = max(_NARROWEST, columns - left - right - 14)
    for span, name, who in zip(spans, names, whose, strict=True):
        bar = _bar(span["start_ms"] / total_ms, span["duration_ms"] / total_ms, width)
        yield f"{name:<{left}}  {who:<{right}} {bar} {span['duration_ms']:>9.1f}".rstrip()
    yield f"{'milliseconds':>{left + right + width + 13}}"
    if largest:
        yield f"* the largest part: {timeline['largest']['share']:.0%} of the time"


def _shown(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that took time, in their order: the longest ones, where there are too many."""
    lasting = [span for span in spans if span["duration_ms"] > 0]
    if len(lasting) <= _MOST_ROWS:
        return lasting
    least = sorted((span["duration_ms"] for span in lasting), reverse=True)[_MOST_ROWS - 1]
    return [span for span in lasting if span["duration_ms"] >= least]


def _whose(span: Mapping[str, Any]) -> str:
    replica = span["replica"][:6]
    return f"{span['service']} {replica}" if replica else str(span["service"])


def _bar(start: float, share: float, width: int) -> str:
    first = min(width - 1, int(start * width))
    last = min(width, max(first + 1, round((start + share) * width)))
    return f"{' ' * first}{'█' * (last - first)}{' ' * (width - last)}"


def _explain(settings: WhySettings) -> str:
    """Why there is no timeline, by the logs of this machine where they say it."""
    name = settings.request_id
    if (own := own_name(name)) is None:
        return f"{name} is no id of a request: it is `r_` and two numbers in hex, as in the header x-tessera-request-id"
    lines = lines_of_all(log_folders(settings.state_dir), own)
    ended = next((line for line in reversed(lines) if "request ended" in line.text), None)
    if ended is None and not lines:
        return (
            f"{name} is unknown: {settings.url} has no such request of yours, and the logs on this machine do not name"
            " it. Timelines are kept for ten minutes after the end; without keys, --user is the `user` of the request"
        )
    if ended is not None and datetime.now(UTC) - _when(ended) > _KEPT:
        return f"{name} ended more than ten minutes ago, and its timeline is forgotten. Its log line:\n{_told(ended)}"
    last = ended or lines[-1]
    return (
        f"{name} has no timeline at {settings.url}: it is another caller's (--api-key, --user), or was refused before"
        " its caller was known, or while many were."
        f" Its last log line:\n{_told(last)}"
    )


def _when(line: LogLine) -> datetime:
    return datetime.fromisoformat(line.at.replace("Z", "+00:00"))


def _told(line: LogLine) -> str:
    return f"{line.at}  {line.process} | {line.text}"
