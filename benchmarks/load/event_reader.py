"""Server-sent events of a completion, read for nothing but tokens: this must cost next to nothing for each of them."""

import json
import re
import time
from array import array
from typing import Any

# In a JSON string a quote is escaped, so that these never match inside generated text.
_TOKEN_IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]').search
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)":\s*"(?!")').search


class EventReader:
    """Takes the body of a stream as it comes and notes when how many tokens came.

    An event counts as many tokens as it has `token_ids`; where a server sends none, an event with text is one token.
    """

    __slots__ = ("_before", "_has_ids", "_last", "_rest", "counts", "times")

    def __init__(self) -> None:
        self.times = array("d")
        self.counts = array("q")
        self._rest = b""
        self._before = b""  # the last two events: usage or an error stands there
        self._last = b""
        self._has_ids = False

    def feed(self, body: bytes) -> None:
        """A piece of the body. Events may begin and end anywhere in it."""
        now = time.perf_counter()
        if self._rest:
            body = self._rest + body
            self._rest = b""
        if not body.endswith(b"\n"):
            cut = body.rfind(b"\n") + 1
            self._rest = body[cut:]
            body = body[:cut]
        tokens = 0
        for line in body.split(b"\n"):
            if line.startswith(b"data:"):
                tokens += self._tokens_of(line)
        if tokens:
            self.times.append(now)
            self.counts.append(tokens)

    def usage(self) -> dict[str, Any]:
        """The server's own counts (OpenAI's `usage`), empty if it gave none."""
        for event in self._last_objects():
            if isinstance(event.get("usage"), dict):
                return dict(event["usage"])
        return {}

    def error(self) -> str:
        """The message of an error event, empty if there was none."""
        for event in self._last_objects():
            error = event.get("error")
            if error:
                return str(error.get("message", error)) if isinstance(error, dict) else str(error)
        return ""

    def _tokens_of(self, line: bytes) -> int:
        if line.startswith(b"[DONE]", 6) or line.startswith(b"[DONE]", 5):
            return 0
        self._before = self._last
        self._last = line
        found = _TOKEN_IDS(line)
        if found is not None:
            self._has_ids = True
            ids: bytes = found[1]
            return ids.count(b",") + 1 if ids.strip() else 0
        return 1 if not self._has_ids and _TEXT(line) else 0

    def _last_objects(self) -> list[dict[str, Any]]:
        objects = []
        for line in (self._last, self._before):
            try:
                content = json.loads(line[5:])
            except ValueError:
                continue
            if isinstance(content, dict):
                objects.append(content)
        return objects
