"""Reads calls whose arguments are written one by one between markers, and writes them as JSON."""

import json
from collections.abc import Collection, Generator, Mapping
from typing import Any

from shared.output_format.json_reader import Malformed, behind_space, copy_string, is_mark
from shared.output_format.table import Xml

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_LONGEST_NAME = 1024


def schema_types(schema: Any) -> Collection[str]:
    """The JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return ()
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,)
    if isinstance(kind, list):
        return [one for one in kind if isinstance(one, str)]
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return ("string",)
    for several in ("anyOf", "oneOf"):
        inner = schema.get(several)
        if isinstance(inner, list):
            return [kind for one in inner for kind in schema_types(one)]
    return ()


def as_json(raw: str, types: Collection[str]) -> str:
    """A value as it was written, as JSON: text where a string is allowed, else what it reads as."""
    if "string" not in types or (raw.strip() == "null" and "null" in types):
        try:
            json.loads(raw, parse_constant=_refuse)
        except (ValueError, RecursionError):
            if raw.strip() in _PYTHON:
                return _PYTHON[raw.strip()]
        else:
            return raw.strip()
    return json.dumps(raw, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def until(*markers: str, longest: int = 0) -> Generator[None, str, tuple[str, str]]:
    """Returns the text before the first of `markers`, and which one it is."""
    text = ""
    while True:
        char = yield
        if is_mark(char) and not any(char in marker for marker in markers):
            raise Malformed
        text += char
        for marker in markers:
            if text.endswith(marker):
                return text[: -len(marker)], marker
        if longest and len(text) > longest:
            raise Malformed


def read_name(xml: Xml, close: str) -> Generator[None, str, tuple[str, str]]:
    """Returns the name of the tool, and which marker came behind it where it has none of its own."""
    if xml.name_open:
        before, _ = yield from until(xml.name_open, longest=_LONGEST_NAME)
        if before.strip():
            raise Malformed
    if xml.name_close:
        name, _ = yield from until(xml.name_close, longest=_LONGEST_NAME)
        return name.strip(), ""
    name, mark = yield from until(xml.key_open, xml.end or close, longest=_LONGEST_NAME)
    return name.strip(), mark


def copy_arguments(
    out: list[str],
    xml: Xml,
    close: str,
    behind_name: str,
    properties: Mapping[str, Any],
    is_quoted: bool,
) -> Generator[None, str, None]:
    """Writes the arguments as a JSON object, up to the marker that ends them. `is_quoted`: they are strings of JSON."""
    end, mark, before = xml.end or close, behind_name, "{"
    while True:
        if not mark:
            _, mark = yield from until(xml.key_open, end)
        if mark == end:
            break
        key, _ = yield from until(xml.key_close, longest=_LONGEST_NAME)
        out.append(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        before, mark = ", ", ""
        if xml.value_open:
            yield from until(xml.value_open)
        if is_quoted:
            yield from _copy_quoted(out, xml)
            continue
        types = schema_types(properties.get(key.strip()))
        if types and set(types) == {"string"}:
            yield from _copy_text(out, xml)
            continue
        raw, _ = yield from until(xml.value_close)
        if xml.breaks:
            raw = raw.removeprefix("\n").removesuffix("\n")
        out.append(as_json(raw, types))
    out.append("}" if before == ", " else "{}")


def _copy_quoted(out: list[str], xml: Xml) -> Generator[None, str, None]:
    """Writes a string of JSON as it comes; a marker within it is text."""
    first = yield from behind_space()
    if first != '"':
        raise Malformed
    out.append(first)
    yield from copy_string(out)
    behind, _ = yield from until(xml.value_close)
    if behind.strip():
        raise Malformed


def _copy_text(out: list[str], xml: Xml) -> Generator[None, str, None]:
    """Writes a string as it comes."""
    out.append('"')
    closers = ("\n" + xml.value_close, xml.value_close) if xml.breaks else (xml.value_close,)
    held, at_start = "", xml.breaks
    while True:
        char = yield
        if is_mark(char) and char not in xml.value_close:
            raise Malformed
        if at_start and char == "\n":
            at_start = False
            continue
        at_start = False
        held += char
        found = next((closer for closer in closers if held == closer), None)
        if found is not None:
            break
        # Only what may begin a closer is held.
        size = len(held)
        keep = next(
            n for n in range(size, -1, -1) if any(c.startswith(held[size - n :]) for c in closers)
        )
        out.append(json.dumps(held[: size - keep], ensure_ascii=False)[1:-1])
        held = held[size - keep :]
        if held in closers:
            break
    out.append('"')
