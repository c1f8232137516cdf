"""A file of requests: one JSON object a line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.errors import BenchError


@dataclass(frozen=True, slots=True)
class Entry:
    """One request: a prompt (text or token ids) or the messages of a conversation."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None


def read_dataset(path: Path) -> list[Entry]:
    """Reads lines such as {"prompt": "...", "output_tokens": 64} or {"messages": [...]}. Raises BenchError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    entries = [
        _entry(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not entries:
        raise BenchError(f"{path} has no requests")
    return entries


def _entry(line: str, where: str) -> Entry:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BenchError(f"{where} is not an object")
    output = content.get("output_tokens", content.get("max_tokens"))
    if output is not None and (not isinstance(output, int) or output < 1):
        raise BenchError(f"{where}: output_tokens must be a number above 0")
    prompt, messages = content.get("prompt"), content.get("messages")
    is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not (prompt and isinstance(prompt, str)) and not is_ids:
        prompt = None
    if not isinstance(messages, list) or not messages:
        messages = None
    if (prompt is None) == (messages is None):
        raise BenchError(f"{where} needs either prompt (text or token ids) or messages (a list)")
    return Entry(prompt, messages, output)
