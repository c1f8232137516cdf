"""The lines of a file of requests, in the form of OpenAI's batches."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not empty, with its number from 1 on."""

    number: int
    text: bytes

    @property
    def digest(self) -> str:
        """What tells whether it is still the same."""
        return hashlib.blake2b(self.text, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for: a POST of a JSON body. `problem` says why it is not sent; empty if it is."""

    custom_id: Any
    url: str = ""
    body: bytes = b""
    problem: str = ""


def lines_of(path: Path) -> Iterator[Line]:
    """Yields the lines of a file."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield Line(number, text.rstrip(b"\r\n"))


def read_line(text: bytes) -> LineRequest:
    """The request of a line."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return LineRequest(None, problem=f"the line is not valid JSON: {error}")
    if not isinstance(content, dict):
        return LineRequest(None, problem="the line must be a JSON object")
    name, url, body = content.get("custom_id"), content.get("url"), content.get("body")
    if not isinstance(name, str) or not name:
        return LineRequest(None, problem="custom_id must be a text")
    if content.get("method") != "POST":
        return LineRequest(name, problem="method must be POST")
    if not isinstance(url, str) or not url.startswith("/"):
        return LineRequest(
            name, problem="url must be the path of a route, such as /v1/chat/completions"
        )
    if not isinstance(body, dict):
        return LineRequest(name, problem="body must be an object")
    if body.get("stream"):
        return LineRequest(name, problem="body.stream must be false: the answers stand in a file")
    return LineRequest(name, url, json.dumps(body).encode())


def answered(run: str, line: Line, custom_id: str, status: int, name: str, body: bytes) -> bytes:
    """The result of a request that was answered, also by an error."""
    try:
        content = json.loads(body)
    except ValueError:
        content = body.decode("utf-8", "replace")
    response = {"status_code": status, "request_id": name, "body": content}
    return _result(run, line, custom_id, response, None)


def unanswered(run: str, line: Line, asked: LineRequest) -> bytes:
    """The result of a line that is no request."""
    error = {"code": "invalid_line", "message": f"line {line.number}: {asked.problem}"}
    return _result(run, line, asked.custom_id, None, error)


def _result(run: str, line: Line, custom_id: Any, response: Any, error: Any) -> bytes:
    name = f"batch_req_{run}_{line.number}"
    content = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
