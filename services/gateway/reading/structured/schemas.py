"""JSON schemas as llguidance takes them: objects closed, white space bounded, the client's own settings of the compiler
left out.
"""

from typing import Any

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.schema_walk import Node, children, reachable, target

# Between values: one space, or one line end and an indent. White space without end is what weak models
# fall into, which repeat a token that the form allows; here the second one is not allowed.
_WHITESPACE = r"\x20|\r?\n(\x20{0,20}|\t{0,10})"
# llguidance reads its own settings from here.
_SETTINGS = "x-guidance"
# Keywords that allow and forbid nothing by themselves.
_SILENT = frozenset(
    ("$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
     "deprecated", "readOnly", "writeOnly", "discriminator", "nullable", "example", "type", _SETTINGS)
)  # fmt: skip
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")


def prepared(schema: Any, *, closed: bool, lenient: bool, whitespace: str | None) -> Node:
    """The schema to compile; what is given is changed. `closed`: objects have no properties but those listed, where the
    schema does not say which others. `lenient`: keywords that cannot be held to are left aside. `whitespace`: between
    values, empty for none. Raises FormError.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise FormError("must be a JSON schema: an object")
    for _, node in reachable(schema):
        node.pop(_SETTINGS, None)
    if closed:
        _close(schema)
    settings: dict[str, Any] = (
        {"whitespace_flexible": False}
        if whitespace == ""
        else {"whitespace_pattern": _WHITESPACE if whitespace is None else whitespace}
    )
    if lenient:
        settings |= {"lenient": True, "coerce_one_of": True}
    return {_SETTINGS: settings, **schema}


def _close(root: Node) -> None:
    """Closes objects that stand for themselves. One that is joined with others (`allOf`, a reference beside
    properties) stays as it is: closed, each would forbid the properties of the other.
    """
    alone: dict[int, Node] = {}
    joined: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    seen: set[tuple[int, bool]] = set()
    while waiting:
        node, in_join = waiting.pop()
        if not isinstance(node, dict) or (id(node), in_join) in seen:
            continue
        seen.add((id(node), in_join))
        in_join = in_join or _joins(node)
        if in_join:
            joined.add(id(node))
        else:
            alone[id(node)] = node
        waiting += [(child, in_join) for _, _, child in children(node)]
        if (referred := target(root, node.get("$ref"))) is not None:
            waiting.append((referred[1], in_join))
    for key, node in alone.items():
        if key not in joined and _can_be_closed(node):
            node["additionalProperties"] = False


def _joins(node: Node) -> bool:
    """Whether several schemas hold for the same value."""
    parts = node.keys() - _SILENT
    if not any(keyword in parts for keyword in _JOINING):
        return False
    alternatives = node.get("allOf")
    return len(parts) > 1 or (isinstance(alternatives, list) and len(alternatives) > 1)


def _can_be_closed(node: Node) -> bool:
    properties, required = node.get("properties"), node.get("required", ())
    if not isinstance(properties, dict) or not properties:
        return False
    if "additionalProperties" in node or "unevaluatedProperties" in node:
        return False
    return isinstance(required, list | tuple) and all(
        isinstance(name, str) and name in properties for name in required
    )
