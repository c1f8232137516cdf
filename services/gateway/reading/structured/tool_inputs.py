"""The text that a custom tool takes, under its grammar, as it stands in a call."""

import json
from typing import Any

from llguidance import LLMatcher

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.json_strings import in_json_string
from services.gateway.reading.structured.parts import TEXT, Parts

TOOL_INPUT = "tool_input"


def tool_input(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    """The rule of an input: of what is written for it in a string of JSON, or, where the form has an `end`, of itself
    up to this marker. Raises FormError naming the `field` of the request.
    """
    definition, is_lark = str(form.get("definition")), form.get("syntax") == "lark"
    try:
        lark = definition if is_lark else _as_lark(definition)
        parts.check_lark(lark)
        if isinstance(form.get("end"), str):
            return _up_to(parts, lark.removeprefix("start: "), form["end"])
        return parts.lark(in_json_string(lark))
    except FormError as error:
        raise FormError(str(error), "", error.reason, field=str(form.get("field"))) from None


def _as_lark(expression: str) -> str:
    text = expression.removeprefix("^")
    if text.endswith("$") and not text.endswith(r"\$"):
        text = text[:-1]
    if not text:
        return 'start: ""'
    return str(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"])


def _up_to(parts: Parts, expression: str, end: str) -> str:
    """An expression's text and the first marker behind it, which is not in the text."""
    token = next((one for one in parts.added_tokens if one in end), "")
    before = end.partition(token)[0] if token else end
    if token:  # which no text can hold
        name = parts.rule(
            f"{expression} {json.dumps(before)}" if before else expression, is_terminal=True
        )
        return f"{name} {parts.literal(end[len(before) :])}"
    without = f"~({TEXT} {json.dumps(end.strip())} {TEXT})"
    name = parts.rule(f"({expression} & {without}) {json.dumps(end)}", is_terminal=True)
    return parts.rule(name, "[lazy]")
