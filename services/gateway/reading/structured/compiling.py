"""From a form to the text of one llguidance grammar. Runs in a confined process: forms are programs."""

import json
from typing import Any

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.parts import Parts, SchemaStyle
from services.gateway.reading.structured.structural_tags import structural_tag


def compiled(job: dict[str, Any]) -> str:
    """The grammar of a job of `grammars.Grammars`, checked. Raises FormError."""
    value, kind = _loads(job["json"]), job["kind"]
    if kind in ("json", "structural_tag") and isinstance(value, str):
        value = _loads(value)
    parts = Parts(job["added_tokens"], _style(job))
    if kind == "json":
        parts.start = parts.json_schema(value)
    elif kind == "regex":
        parts.start = parts.regex(value)
    elif kind == "choice":
        # One terminal: of rules the library follows no more than 2,000 at once.
        parts.rules.append("CHOICE: " + " | ".join(map(json.dumps, value)))
        parts.start = "CHOICE"
    elif kind == "grammar":
        parts.start = parts.grammar(value)
    else:
        parts.start = structural_tag(parts, value)
    if job["calls"]:
        parts.start = f"({parts.start}) | ({_calls(parts, job['calls'])})"
    return parts.written(with_space=job["with_space"])


def _calls(parts: Parts, job: dict[str, Any]) -> str:
    """The rule of calls that an answer may be instead."""
    parts.style = _style(job)
    try:
        return structural_tag(parts, _loads(job["json"]))
    except FormError as error:
        error.is_of_calls = True
        raise


def _style(job: dict[str, Any]) -> SchemaStyle:
    return SchemaStyle(job["closed"], job["lenient"], job["whitespace"])


def _loads(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise FormError("is nested too deeply") from None
    except ValueError as error:
        raise FormError(f"is not valid JSON: {error}") from None
