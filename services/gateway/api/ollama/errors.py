"""Errors as Ollama has them, {"error": text}, about fields under Ollama's names."""

import json
import re
from collections.abc import Mapping

from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError

_ROOT = re.compile(r"[^.\[]*")
# Our names of fields, in errors of what all APIs share, and Ollama's.
_NAMES: Mapping[str, str] = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            "frequency_penalty", "min_p", "presence_penalty", "seed", "stop", "temperature", "top_k", "top_p",
        )
    },
}  # fmt: skip


def error_text(error: ServingError) -> str:
    """What went wrong, with the field as its client knows it."""
    field = error.metadata.get("field", "")
    found = _ROOT.match(field)
    root = found[0] if found is not None else ""
    is_renamed = root in _NAMES and error.message.startswith(root)
    if not is_renamed or error.reason == "UNSUPPORTED_PARAMETER":  # which the body calls so itself
        return error.message
    return _NAMES[root] + error.message.removeprefix(root)


def error_body(error: ServingError) -> bytes:
    """A whole JSON body."""
    return json.dumps({"error": error_text(error)}, ensure_ascii=False).encode()


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    return ErrorReply(error.http_status, error_body(error))
