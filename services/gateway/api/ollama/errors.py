"""Errors as Ollama has them, {"error": text}, about fields under Ollama's names."""

import json
from collections.abc import Mapping

from services.gateway.api.renamed_fields import renamed
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError

# Our names of fields, in errors of what all APIs share, and Ollama's.
_NAMES: Mapping[str, str] = {
    "max_tokens": "options.num_predict",
    "max_window_size": "messages",  # which is no field here: `truncate` makes it
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
    return renamed(error, _NAMES).message.removesuffix(", or raise max_window_size")


def error_body(error: ServingError) -> bytes:
    """A whole JSON body."""
    return json.dumps({"error": error_text(error)}, ensure_ascii=False).encode()


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    return ErrorReply(error.http_status, error_body(error))
