"""Which form a model writes: what was asked for by name, or what its chat template shows."""

from shared.errors import InvalidRequest
from shared.output_format.table import (
    CALL_ALIASES,
    FORMATS,
    REASONING,
    REASONING_ALIASES,
    OutputFormat,
    ReasoningFormat,
)

AUTO, NONE = "auto", "none"


def find_calls(name: str, template: str | None) -> OutputFormat | None:
    """The form of calls by `--tool-call-parser`; None where the model has none. Raises InvalidRequest for a name of no
    form.
    """
    if name == AUTO:
        told = template or ""
        return next((row for row in FORMATS.values() if _tells(row, told)), None)
    if name == NONE:
        return None
    row = FORMATS.get(CALL_ALIASES.get(name, name))
    if row is None:
        raise _unknown("--tool-call-parser", name, [*FORMATS, *CALL_ALIASES])
    return row


def find_reasoning(name: str, template: str | None) -> ReasoningFormat | None:
    """The form of reasoning by `--reasoning-parser`; None where the model has none. Raises InvalidRequest."""
    if name == AUTO:
        told = template or ""
        return next((row for row in REASONING.values() if row.close in told), None)
    if name == NONE:
        return None
    row = REASONING.get(REASONING_ALIASES.get(name, name))
    if row is None:
        raise _unknown("--reasoning-parser", name, [*REASONING, *REASONING_ALIASES])
    return row


def _tells(row: OutputFormat, template: str) -> bool:
    if any(text in template for text in row.told_against):
        return False
    return any(text in template for text in row.told_by)


def _unknown(flag: str, name: str, known: list[str]) -> InvalidRequest:
    names = ", ".join([AUTO, NONE, *dict.fromkeys(known)])
    return InvalidRequest(
        "UNKNOWN_PARSER", f"{flag} {name!r} is not known: it must be one of {names}"
    )
