"""What llguidance says of a form, as an error of ours: it names the keyword, and here its place is found."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from services.gateway.reading.structured.errors import FormError, unsupported
from services.gateway.reading.structured.schema_walk import Node, reachable

_LONGEST = 400
# Schemas that are tried with another `oneOf` taken away.
_MOST_TRIES = 32

_KEYS = re.compile(r"Unimplemented keys: (\[.*?\])")
_FORMAT = re.compile(r"Unknown format: (.*)")
_TYPE = re.compile(r"Invalid type: (.*)")
_POINTER = re.compile(r"Pointer '(.*)' does not exist")
_RESOURCE = re.compile(r"Resource '(.*)' is not present")
_REGEX = re.compile(
    r"regex parse error:\s*(?P<shown>.*?)\n\s*\^+.*?error: (?P<error>[^\n]*)", re.DOTALL
)
_ANCHOR = re.compile(r"lookarounds not supported yet; \w+ in regex /(.*)/", re.DOTALL)
_ONE_OF = "oneOf constraints are not supported"
# Before the message of a schema or an expression within a grammar, and behind it, where it stands.
_PLACE = re.compile(r"^(?:at )?(?P<place>\d+\(\d+\)): ")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)


def schema_error(message: str, root: Node, check: Callable[[Node], str]) -> FormError:
    """The error about a schema. `check` gives llguidance's message for another one, empty if that is valid."""
    if found := _KEYS.match(message):
        names = json.loads(found[1])
        at, keyword = next(_holding(root, names), ("", names[0]))
        return unsupported(f'"{keyword}" is not supported; leave it out', at)
    if found := _FORMAT.match(message):
        name = found[1]
        at = _first(root, lambda node: node.get("format") == name)
        return unsupported(f'"format": "{name}" is not supported; leave it out', at)
    if message.startswith(_ONE_OF):
        at = _one_of(root, check)
        return unsupported('"oneOf" is not supported where several could hold; use "anyOf"', at)
    if broken := _regex(message):
        shown, error = broken
        at = _first(root, lambda node: _has_pattern(node, shown))
        return unsupported(f'"pattern": {error}', at)
    if found := _TYPE.match(message):
        name = found[1]
        at = _first(root, lambda node: name in _listed(node.get("type")))
        return FormError(f'"type": "{name}" is no type of JSON', at)
    if found := _POINTER.match(message) or _RESOURCE.match(message):
        name = found[1]
        at = _first(root, lambda node: name in str(node.get("$ref", "")))
        return FormError(f'"$ref": {name!r} is not in this schema', at)
    return FormError(_short(message))


def grammar_error(message: str) -> FormError:
    """The error about an expression or a grammar."""
    if found := _regex(message):
        return FormError(found[1])
    place = _PLACE.match(message)
    text = _EXCERPT.sub("", _PLACE.sub("", message))
    return FormError(f"line {place['place']}: {_short(text)}" if place else _short(text))


def _regex(message: str) -> tuple[str, str] | None:
    """The expression that cannot be read, and why."""
    if found := _REGEX.search(message):
        return found["shown"], found["error"]
    if found := _ANCHOR.search(message):
        return found[1], "word boundaries, and anchors within an expression, are not supported"
    return None


def _one_of(root: Node, check: Callable[[Node], str]) -> str:
    """Where a `oneOf` stands that is not taken: the last of them, since each that comes before is taken away."""
    places = [(place, node) for place, node in reachable(root) if "oneOf" in node]
    for place, node in places[:_MOST_TRIES]:
        del node["oneOf"]
        if not check(root).startswith(_ONE_OF):
            return place
    return ""


def _holding(root: Node, names: list[str]) -> Iterator[tuple[str, str]]:
    for place, node in reachable(root):
        for name in node:
            if name in names:
                yield place, name


def _first(root: Node, fits: Callable[[Node], bool]) -> str:
    return next((place for place, node in reachable(root) if fits(node)), "")


def _has_pattern(node: Node, shown: str) -> bool:
    patterns: list[Any] = [node.get("pattern"), *_listed(node.get("patternProperties"))]
    return any(isinstance(one, str) and (one == shown or shown.strip() == one) for one in patterns)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | dict) else [value]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
