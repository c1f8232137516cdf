"""The schemas within a JSON schema: where they stand, and which of them an answer can reach."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]

_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$-]*")


def children(node: Node) -> Iterator[tuple[str, str, Any]]:
    """The schemas directly within one: the keyword, the place (".properties.tags"), and the schema."""
    for keyword, value in node.items():
        if keyword in _ONE and isinstance(value, dict | bool):
            yield keyword, f".{keyword}", value
        elif keyword in _LISTS and isinstance(value, list):
            for index, one in enumerate(value):
                yield keyword, f".{keyword}[{index}]", one
        elif keyword in _MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield keyword, f".{keyword}{_step(name)}", one


def reachable(root: Node) -> Iterator[tuple[str, Node]]:
    """Each schema that an answer can reach, with its place, in the order of the text; what is referred to comes behind
    what refers to it.
    """
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        place, node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield place, node
        inner = [(place + step, child) for _, step, child in children(node)]
        referred = target(root, node.get("$ref"))
        waiting += [*([referred] if referred else []), *reversed(inner)]


def target(root: Node, reference: Any) -> tuple[str, Any] | None:
    """The place and the schema that a reference within the document ("#/$defs/a") points to; None for another."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place, value = "", root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        inner: Any = value
        if isinstance(inner, dict) and name in inner:
            place, value = place + _step(name), inner[name]
        elif isinstance(inner, list) and _INDEX.fullmatch(name) and int(name) < len(inner):
            place, value = f"{place}[{name}]", inner[int(name)]
        else:
            return None
    return place, value


def _step(name: str) -> str:
    """One more step of a place. A name of a client may be anything."""
    return f".{name}" if _PLAIN_NAME.fullmatch(name) else f"[{name[:64]!r}]"
