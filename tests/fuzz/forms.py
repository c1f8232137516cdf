"""Forms of answers, each nearly right: JSON schemas, expressions, grammars and structural tags; and JSON in a text."""

import contextlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import values

_TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
_EXPRESSIONS = [
    "[a-z]{1,8}", "a*", "(a|aa)+", "(a{1,1000}){1,1000}", r"\d{1,4000}", r"\p{L}+", "(?i)straße", "^a$", ".{0,500}",
    "(?=a)b", r"\1", "(", "[", "a{5,2}", "", "[^]", "(?:" * 300 + ")" * 300, "\ud800", "a\0b", "漢{1,3}", "/(/",
]  # fmt: skip
_GRAMMARS = [
    'start: "a" | "b"',
    'root ::= "a"*',
    "start: start",
    "start: A\nA: A",
    "start: /(/",
    "%import x",
    "start: <[999999]>",
    "start: %json {}",
    'start: %json {"type": "object"}',
    "start: %regex {}",
    "start[max_tokens=0]: /a/",
    "start: @x",
    "start: " + "(" * 500 + '"a"' + ")" * 500,
    'start: "a"{0,1000000}',
    'start: x\nx: "a" x | ""',
    "",
    "\ud800",
]
_TEXTS_OF_JSON = [
    "{}", "[]", "{", "null", "NaN", "1e400", '"\\ud800"', '{"\\ud800": 1}', '{"a": "\\udfff\\ud800"}', '{"a": 1e400}',
    '{"a": NaN}', "[" * 5000, '{"a":' * 40 + "1" + "}" * 40, "9" * 5000, '{"a": 1, "a": 2}', "\ufeff{}",
    '[{"type": "function", "function": {"name": "a\\ud800"}}]', '[{"type": "function", "function": {"name": "a"}}]',
]  # fmt: skip
_PATTERN = ["^a+$", "(", "(?=a)", "[a-z]{1,3}"]
_DEEPEST = 4


def schema(draw: random.Random, deepest: int = _DEEPEST) -> Any:
    """A JSON schema, whose keywords may have values that are none."""
    found: dict[str, Any] = {"type": draw.choice([*_TYPES, ["string", "null"]])}
    for keyword, make in _KEYWORDS.items():
        if draw.random() < 0.08:
            found[keyword] = make(draw, deepest) if draw.random() < 0.8 else values.any_value(draw)
    if deepest and draw.random() < 0.4:
        found["properties"] = {
            draw.choice(["a", "b", "\ud800", ""]): schema(draw, deepest - 1)
            for _ in range(draw.choice([1, 1, 2, 2, 300]) if deepest == _DEEPEST else 1)
        }
    return found


def expression(draw: random.Random) -> str:
    """A regular expression."""
    return "".join(draw.choice(_EXPRESSIONS) for _ in range(draw.choice([1, 1, 2])))


def grammar(draw: random.Random) -> str:
    """A grammar in Lark's form or EBNF."""
    return draw.choice(_GRAMMARS)


def input_format(draw: random.Random, *, is_nested: bool) -> Any:
    """What the input of a custom tool is held to, as chats nest it or as responses have it."""
    if draw.random() < 0.2:
        return draw.choice([{"type": "text"}, None, {"type": "grammar"}, "text"])
    syntax = draw.choice(["lark", "lark", "regex", "gbnf"])
    definition = expression(draw) if syntax == "regex" else draw.choice([grammar, lark])(draw)
    told = {"syntax": syntax, "definition": definition}
    return {"type": "grammar", "grammar": told} if is_nested else {"type": "grammar", **told}


def lark(draw: random.Random) -> str:
    """A grammar in Lark's form of several terminals."""
    bodies = [
        '"\\n" rule', "TOKEN*", 'rule? | "\""i', '"a".."z"', f"/{expression(draw)}/", "WS ~ 1..3", "[rule] -> other",
    ]  # fmt: skip
    lines = [f"{name}: {draw.choice(bodies)} {draw.choice(bodies)}" for name in ("start", "rule")]
    lines += [f"TOKEN: {draw.choice(bodies)}", draw.choice(["", "%ignore WS", "%ignore TOKEN"])]
    lines.append(draw.choice(["%import common.WS", "%import common (WS, LF)", "WS: /[ \\n]+/"]))
    return "\n".join(lines)


def tag(draw: random.Random) -> Any:
    """A structural tag."""
    return {"type": "structural_tag", "format": _part(draw, _DEEPEST)}


def json_text(draw: random.Random) -> str:
    """JSON as a text, which may hold what no text, no number and no other JSON may."""
    if draw.random() < 0.3:
        with contextlib.suppress(RecursionError):
            return json.dumps(schema(draw))
    return draw.choice(_TEXTS_OF_JSON)


def _part(draw: random.Random, deepest: int) -> Any:
    begin, end = draw.choice(["<a>", "", "\ud800", "<|im_start|>"]), draw.choice(["</a>", ""])
    match draw.randrange(8 if deepest else 4):
        case 0:
            return {"type": "json_schema", "json_schema": schema(draw)}
        case 1:
            return {"type": "regex", "pattern": expression(draw)}
        case 2:
            return {"type": "grammar", "grammar": grammar(draw)}
        case 3:
            return draw.choice(
                [{"type": "any_text"}, {"type": "const_string", "value": begin}, None, 0, "x"]
            )
        case 4:
            parts = [_part(draw, deepest - 1) for _ in range(draw.randint(0, 2))]
            return {"type": draw.choice(["sequence", "or"]), "elements": parts}
    one = {"begin": begin, "content": _part(draw, deepest - 1), "end": end}
    return draw.choice(
        [
            {"type": "tag", **one},
            {"type": "triggered_tags", "triggers": [begin], "tags": [one]},
            {"type": "tags_with_separator", "tags": [one], "separator": end},
        ]
    )


def _list_of(draw: random.Random, deepest: int) -> Any:
    return [schema(draw, deepest - 1) for _ in range(draw.randint(0, 3))] if deepest else []


def _inner(draw: random.Random, deepest: int) -> Any:
    return schema(draw, deepest - 1) if deepest else draw.choice([True, False])


def _number(draw: random.Random, _: int) -> Any:
    return values.number(draw)


_KEYWORDS: Mapping[str, Callable[[random.Random, int], Any]] = {
    "minimum": _number, "maximum": _number, "exclusiveMinimum": _number, "multipleOf": _number,
    "minLength": _number, "maxLength": _number, "minItems": _number, "maxItems": _number, "maxProperties": _number,
    "items": _inner, "additionalProperties": _inner, "not": _inner, "if": _inner, "contains": _inner,
    "prefixItems": _list_of, "allOf": _list_of, "anyOf": _list_of, "oneOf": _list_of,
    "patternProperties": lambda draw, deepest: {draw.choice(_PATTERN): _inner(draw, deepest)},
    "$defs": lambda draw, deepest: {"a": _inner(draw, deepest)},
    "$ref": lambda draw, _: draw.choice(["#", "#/$defs/a", "#/anyOf/" + "9" * 5000, "#/\ud800", "http://x/y", "#a"]),
    "pattern": lambda draw, _: draw.choice(_PATTERN),
    "format": lambda draw, _: draw.choice(["date-time", "uuid", "\0", "regex"]),
    "enum": lambda draw, _: [values.any_value(draw) for _ in range(draw.randint(0, 3))],
    "const": lambda draw, _: values.any_value(draw),
    "required": lambda draw, _: draw.choice([["a"], ["z"], "a", [1]]),
    "x-guidance": lambda draw, _: {"whitespace_pattern": "("},
}  # fmt: skip


# By the names that requests give them.
MAKERS: Mapping[str, Callable[[random.Random], Any]] = {
    "json": schema,
    "regex": expression,
    "grammar": grammar,
    "structural_tag": tag,
}
