"""What becomes of a schema, and the place in it that an error names."""

import json
from typing import Any

import pytest

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.schemas import prepared
from tests.support.gateway.forms import compile_form

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**OPEN, "additionalProperties": False}


def closed(schema: Any) -> Any:
    """The schema after closing, without our settings."""
    copy = json.loads(json.dumps(schema))
    found = prepared(copy, closed=True, lenient=False, whitespace=None)
    del found["x-guidance"]
    return found


def test_objects_with_properties_are_closed_wherever_they_stand() -> None:
    assert closed(OPEN) == CLOSED
    assert closed({"type": "array", "items": OPEN}) == {"type": "array", "items": CLOSED}
    assert closed({"anyOf": [OPEN, {"type": "null"}]}) == {"anyOf": [CLOSED, {"type": "null"}]}
    referred = {"$ref": "#/$defs/a", "$defs": {"a": OPEN}}
    assert closed(referred) == {**referred, "$defs": {"a": CLOSED}}
    single = {"allOf": [{"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": OPEN}}
    assert closed(single) == {**single, "$defs": {"a": CLOSED}}
    loop = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert closed(loop) == {**loop, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OPEN, "additionalProperties": {"type": "integer"}},
        {**OPEN, "required": ["b"]},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}], "$defs": {"a": OPEN}},
        {"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": OPEN}},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"const": {"properties": {"a": 1}}},
    ],
    ids=str,
)
def test_what_says_otherwise_or_is_joined_with_others_stays(schema: Any) -> None:
    assert closed(schema) == schema


def test_the_compilers_own_settings_are_not_the_clients() -> None:
    """Such as "lenient", with which `not` would be left aside."""
    settings = {"lenient": True, "whitespace_flexible": False}
    found = prepared({**OPEN, "x-guidance": settings}, closed=False, lenient=False, whitespace=None)
    assert found == {
        **OPEN,
        "x-guidance": {"whitespace_pattern": r"\x20|\r?\n(\x20{0,20}|\t{0,10})"},
    }
    named = closed({"type": "object", "properties": {"x-guidance": {"x-guidance": {}}}})
    assert named["properties"] == {"x-guidance": {}}


def at(place: str, inner: Any) -> Any:
    """A schema that stands at a place of names, "properties.a.items"."""
    for name in reversed(place.split(".")):
        inner = {name: inner}
    return inner


ERRORS: list[tuple[Any, str, str, str]] = [
    (at("properties.tags", {"type": "array", "uniqueItems": True}), ".properties.tags", "UNSUPPORTED_SCHEMA",
     '"uniqueItems" is not supported; leave it out'),
    (at("properties.not.items", {"not": {}}), ".properties.not.items", "UNSUPPORTED_SCHEMA", '"not" is not'),
    ({"$ref": "#/$defs/b", "$defs": {"a": {"not": {}}, "b": {"items": {"not": {}}}}}, ".$defs.b.items",
     "UNSUPPORTED_SCHEMA", '"not"'),
    (at("properties.a b", {"if": {}}), ".properties['a b']", "UNSUPPORTED_SCHEMA", '"if"'),
    ({"format": 'Unimplemented keys: [x]'}, "", "UNSUPPORTED_SCHEMA", "Unimplemented"),
    ({"anyOf": [{}, {"format": "shoe"}]}, ".anyOf[1]", "UNSUPPORTED_SCHEMA", '"format": "shoe"'),
    (at("properties.a", {"type": "string", "pattern": "(?=a)b"}), ".properties.a", "UNSUPPORTED_SCHEMA", "look-around"),
    (at("properties.a", {"type": "string", "pattern": r"a\b"}), ".properties.a", "UNSUPPORTED_SCHEMA", "boundaries"),
    (at("properties.a", {"patternProperties": {r"(a)\1": {}}}), ".properties.a", "UNSUPPORTED_SCHEMA", "backref"),
    ({"properties": {"a": {"oneOf": [{"type": "null"}, {"type": "string"}]},
                     "b": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}}},
     ".properties.b", "UNSUPPORTED_SCHEMA", '"anyOf"'),
    (at("properties.a", {"type": "strin"}), ".properties.a", "INVALID_GRAMMAR", '"strin"'),
    (at("properties.a", {"$ref": "#/$defs/a"}), ".properties.a", "INVALID_GRAMMAR", "/$defs/a"),
    (at("properties.a", {"$ref": "http://a/b"}), ".properties.a", "INVALID_GRAMMAR", "http://a/b"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "", "INVALID_GRAMMAR", "minItems (3)"),
    ({"minimum": "a"}, "", "INVALID_GRAMMAR", "minimum"),
    ([1], "", "INVALID_GRAMMAR", "an object"),
    (False, "", "INVALID_GRAMMAR", "an object"),
    ("{", "", "INVALID_GRAMMAR", "not valid JSON"),
    ({"minimum": float("nan")}, "", "INVALID_GRAMMAR", "JSON"),
    ({"const": "\ud800"}, "", "INVALID_GRAMMAR", "JSON"),
    (json.dumps({"a": 1})[:-1] + ', "b": ' + "[" * 5000 + "]" * 5000 + "}", "", "INVALID_GRAMMAR", "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "reason", "text"), ERRORS, ids=lambda v: str(v)[:50])
def test_errors_name_the_keyword_and_its_place(
    schema: Any, place: str, reason: str, text: str
) -> None:
    with pytest.raises(FormError) as caught:
        compile_form("json", schema)
    assert (caught.value.at, caught.value.reason) == (place, reason)
    assert text in str(caught.value) and len(str(caught.value)) < 500


def test_what_cannot_be_held_to_is_left_aside_where_it_need_not_be() -> None:
    compile_form("json", at("properties.a", {"type": "array", "uniqueItems": True}), lenient=True)


GRAMMARS: list[tuple[str, Any, str]] = [
    ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
    ("regex", "(a", "unclosed group"),
    ("regex", "a$b", "anchors"),
    ("grammar", "start: a", 'line 1(8): unknown name: "a"'),
    ("grammar", "root ::= a", "Rule 'a' not found"),
    ("grammar", "hello", "neither Lark nor EBNF"),
    ("grammar", '{"grammars": []}', "neither Lark nor EBNF"),
    ("structural_tag", {}, "must be a list"),
]


@pytest.mark.parametrize(("kind", "value", "text"), GRAMMARS, ids=lambda v: str(v)[:40])
def test_errors_of_other_forms_say_what_is_wrong(kind: Any, value: Any, text: str) -> None:
    with pytest.raises(FormError, match=r"^.{1,300}$") as caught:
        compile_form(kind, value)
    assert text in str(caught.value) and caught.value.reason == "INVALID_GRAMMAR"


def test_the_white_space_is_checked_too() -> None:
    with pytest.raises(FormError, match="the white space between values"):
        compile_form("json", {}, whitespace="(?=a)")
