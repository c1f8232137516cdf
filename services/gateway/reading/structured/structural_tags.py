"""Structural tags: text in which parts between markers follow a form. Both of vLLM's and SGLang's spellings are read:
`structures` with `triggers`, and `format`, a tree of forms.
"""

from collections.abc import Callable
from typing import Any

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.parts import TEXT, Parts
from services.gateway.reading.structured.tool_inputs import TOOL_INPUT, tool_input

_DEEPEST = 32
_MOST_TOKENS = 1 << 24


def structural_tag(parts: Parts, value: Any) -> str:
    """The rule of the whole text. Raises FormError."""
    if not isinstance(value, dict):
        raise FormError("must be a structural tag: an object")
    if value.get("format") is not None:
        return _form(parts, value["format"], ".format", 0)
    listed = _list(value, "structures", "")
    tags = [
        {**_object(one, f".structures[{index}]"), "content": one.get("schema")}
        for index, one in enumerate(listed)
    ]
    bodies = [f".structures[{index}]" for index in range(len(tags))]

    def content(index: int) -> str:
        return parts.json_schema(tags[index]["content"], f"{bodies[index]}.schema")

    return _triggered(parts, value, tags, bodies, content)


def _form(parts: Parts, form: Any, at: str, depth: int) -> str:
    if depth > _DEEPEST:
        raise FormError(f"is nested deeper than {_DEEPEST} levels", at[:200])
    kind = _object(form, at).get("type")
    write = _KINDS.get(kind) if isinstance(kind, str) else None
    if kind == TOOL_INPUT:  # ours, which clients are not told of
        write = tool_input
    if write is None:
        names = ", ".join(_KINDS)
        raise FormError(f"must be one of {names}", f"{at}.type")
    return write(parts, form, at, depth)


def _const_string(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    return parts.literal(_text(form, "value", at))


def _json_schema(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    return parts.json_schema(form.get("json_schema"), f"{at}.json_schema")


def _regex(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    return parts.regex(form.get("pattern"), f"{at}.pattern")


def _grammar(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    return parts.grammar(form.get("grammar"), f"{at}.grammar")


def _any_text(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    if form.get("excludes"):
        raise FormError("is not supported: leave it out", f"{at}.excludes")
    return TEXT


def _any_tokens(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    excluded = []
    for index, text in enumerate(form.get("excludes") or ()):
        number = parts.added_tokens.get(text) if isinstance(text, str) else None
        if number is None:
            raise FormError(
                "must be a token that was added to the vocabulary", f"{at}.excludes[{index}]"
            )
        excluded.append(str(number))
    one = f"<[^{','.join(excluded)}]>" if excluded else "<[*]>"
    most = form.get("max_tokens")
    if most is None:
        return f"{one}*"
    if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= _MOST_TOKENS:
        raise FormError(f"must be a whole number from 0 to {_MOST_TOKENS}", f"{at}.max_tokens")
    return f"{one}{{0,{most}}}" if most else '""'


def _sequence(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    elements = enumerate(_list(form, "elements", at))
    return " ".join(
        f"({_form(parts, one, f'{at}.elements[{index}]', depth + 1)})" for index, one in elements
    )


def _or(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    elements = enumerate(_list(form, "elements", at))
    return " | ".join(
        f"({_form(parts, one, f'{at}.elements[{index}]', depth + 1)})" for index, one in elements
    )


def _tag(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    begin = parts.literal(_text(form, "begin", at))
    return f"{begin} {_tag_rest(parts, form, at, depth)}"


def _tag_rest(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    """What follows the begin of a tag."""
    end = _text(form, "end", at)
    content = form.get("content")
    if isinstance(content, dict) and content.get("type") == "any_text":
        _any_text(parts, content, f"{at}.content", depth)
        return _text_until(parts, end)
    return f"({_form(parts, content, f'{at}.content', depth + 1)}) {parts.literal(end)}"


def _text_until(parts: Parts, end: str) -> str:
    """Any text, and the first `end` behind it."""
    if not end:
        return TEXT
    token = parts.first_token(end)
    if token:
        return f"{TEXT} {parts.literal(end)}"
    return parts.rule(f"{TEXT} {parts.literal(end)}", "[lazy]")


def _triggered_tags(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    if form.get("excludes"):
        raise FormError("is not supported: leave it out", f"{at}.excludes")
    tags = [_object(one, f"{at}.tags[{i}]") for i, one in enumerate(_list(form, "tags", at))]
    places = [f"{at}.tags[{index}]" for index in range(len(tags))]

    def content(index: int) -> str:
        return _form(parts, tags[index].get("content"), f"{places[index]}.content", depth + 1)

    return _triggered(parts, form, tags, places, content, at)


def _tags_with_separator(parts: Parts, form: dict[str, Any], at: str, depth: int) -> str:
    tags = [
        _tag(parts, _object(one, f"{at}.tags[{i}]"), f"{at}.tags[{i}]", depth + 1)
        for i, one in enumerate(_list(form, "tags", at))
    ]
    one = parts.rule(" | ".join(tags))
    more = f"({parts.literal(_text(form, 'separator', at))} {one})*"
    several = one if form.get("stop_after_first") is True else f"{one} {more}"
    return several if form.get("at_least_one") is True else f"({several})?"


def _triggered(
    parts: Parts,
    form: dict[str, Any],
    tags: list[dict[str, Any]],
    places: list[str],
    content: Callable[[int], str],
    at: str = "",
) -> str:
    """Text in which a tag must follow where its trigger is written."""
    triggers = _list(form, "triggers", at)
    for index, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            raise FormError("must be a string of at least one character", f"{at}.triggers[{index}]")
    opened: dict[str, str] = {}
    rules = []
    for index, tag in enumerate(tags):
        begin = _text(tag, "begin", places[index])
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if trigger is None:
            raise FormError("must begin with one of triggers", f"{places[index]}.begin")
        rest = f"({content(index)}) {parts.literal(_text(tag, 'end', places[index]))}"
        if parts.first_token(begin):
            rules.append(parts.rule(f"{TEXT} {parts.literal(begin)} {rest}"))
            continue
        if trigger not in opened:
            opened[trigger] = parts.rule(f"{TEXT} {parts.literal(trigger)}", "[lazy]")
        begun = begin[len(trigger) :]
        rules.append(parts.rule(f"{opened[trigger]} {parts.literal(begun)} {rest}"))
    first = parts.rule(" | ".join(rules))
    if form.get("stop_after_first") is True:
        return first if form.get("at_least_one") is True else f"{first} | {TEXT}"
    return f"{first} {first}* {TEXT}" if form.get("at_least_one") is True else f"{first}* {TEXT}"


_KINDS: dict[str, Callable[[Parts, dict[str, Any], str, int], str]] = {
    "const_string": _const_string,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "any_text": _any_text,
    "any_tokens": _any_tokens,
    "sequence": _sequence,
    "or": _or,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
}


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormError("must be an object", at)
    return value


def _list(form: dict[str, Any], name: str, at: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise FormError("must be a list of at least one entry", f"{at}.{name}")
    return value


def _text(form: dict[str, Any], name: str, at: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise FormError("must be a string", f"{at}.{name}")
    return value
