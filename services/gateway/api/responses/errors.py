"""Errors as OpenAI has them, about fields under the names of the Responses API."""

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.api.error_object import error_object
from services.gateway.api.renamed_fields import renamed
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError

# Our names of fields, in errors of what all APIs share, and those of the Responses API.
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_window_size": "input",  # which is no field here: `truncation` makes it
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}


def error_value(error: ServingError) -> dict[str, Any]:
    """The value of `error` in a reply."""
    message, field = renamed(error, _NAMES)
    message = message.removesuffix(", or raise max_window_size")
    return {**error_object(error), "message": message, "param": field or None}


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    content = json.dumps({"error": error_value(error)}, ensure_ascii=False)
    return ErrorReply(error.http_status, content.encode())


def failure_value(error: ServingError) -> dict[str, Any]:
    """The value of `error` in a response that failed."""
    code = "server_error" if error.http_status >= 499 else "invalid_prompt"
    return {"code": code, "message": renamed(error, _NAMES).message}
