"""What grammars accept, with a real tokenizer: compared with `jsonschema`, with Python's `re`, and by example."""

import json
import random
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from shared.output_format.grammar import calls_form
from shared.output_format.table import FORMATS
from tests.support.gateway.forms import Acceptor, compile_form
from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_like_tokenizer, token_id

TOKENIZER = byte_level_tokenizer()
MATCH = Acceptor(TOKENIZER, "<|im_end|>")

INVOICE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "kind": {"enum": ["a", "b", 3, None]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 2},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#"}]},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {
                "price": {"type": "number", "minimum": 0, "exclusiveMaximum": 100},
                "count": {"type": "integer", "multipleOf": 2},
            },
            "required": ["price"],
            "additionalProperties": False,
        }
    },
}
VALUES: dict[str, list[Any]] = {
    "name": ["a", "Zoë", "six so", "", 1],
    "kind": ["a", 3, None, "c", 4],
    "day": ["2024-02-29", "2024-13-01", "today"],
    "code": ["AB1", "ab1", "AB"],
    "more": [None, True, "x"],
}
PRICES, COUNTS = [0, 1.5, 99.99, -1, 100, "1"], [2, 0, 3, 2.5]


def drawn(random_numbers: random.Random, depth: int = 0) -> dict[str, Any]:
    """A document in the order of the schema, of which any part may be wrong."""
    pick, chance = random_numbers.choice, random_numbers.random
    wrong = 3 if chance() < 0.3 else 1

    def one(values: list[Any]) -> Any:
        return pick(values) if wrong == 3 else values[0]

    lines = []
    for _ in range(pick([0, 1, 2, 3]) if wrong == 3 else 1):
        line = {"price": one(PRICES)}
        if chance() < 0.4:
            line["count"] = one(COUNTS)
        if chance() < 0.05:
            line["other"] = 1
        lines.append(line)
    document: dict[str, Any] = {}
    for name in INVOICE["properties"]:
        if name == "lines" and chance() < 0.95:
            document["lines"] = lines
        elif name != "lines" and chance() < (0.9 if name == "name" else 0.4):
            document[name] = one(VALUES[name])
            if name == "more" and depth < 2 and chance() < 0.5:
                document["more"] = drawn(random_numbers, depth + 1)
    if chance() < 0.05:
        document["other"] = 1
    return document


def test_documents_are_accepted_if_the_schema_holds() -> None:
    grammar = compile_form("json", INVOICE)
    holds = Draft202012Validator(
        INVOICE, format_checker=Draft202012Validator.FORMAT_CHECKER
    ).is_valid
    numbers = random.Random(7)
    seen = {True: 0, False: 0}
    for _ in range(400):
        document = drawn(numbers)
        valid = holds(document)
        seen[valid] += 1
        text = json.dumps(document, ensure_ascii=False, indent=numbers.choice([None, 1]))
        assert MATCH.accepts(grammar, text) is valid, text
    assert min(seen.values()) > 80


KEYWORDS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
     [{"n": 1}, {"n": "a"}, {"x": "a"}, {"x": 1}]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
     [["a", 1], ["a"], [1], ["a", 1, 2]]),
    ({"type": ["string", "null"]}, ["a", None, 1]),
    ({"const": {"a": [1, None]}}, [{"a": [1, None]}, {"a": [1]}]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3, 2, "3"]),
    ({"type": "integer", "exclusiveMinimum": -5, "maximum": 12}, [-5, -4, 12, 13]),
    ({"type": "string", "pattern": "b"}, ["abc", "ac"]),
    ({"type": "string", "format": "uuid"}, ["3f2504e0-4f89-11d3-9a0c-0305e82c3301", "3f25"]),
    ({"type": "string", "format": "email"}, ["a@b.de", "a"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.4", "1.2.3"]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"b": 1}]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 1, 0.3]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1, None]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "documents"), KEYWORDS, ids=lambda v: str(v)[:60])
def test_keywords_mean_what_the_standard_says(schema: dict[str, Any], documents: list[Any]) -> None:
    grammar = compile_form("json", schema, closed=False)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    answers = {validator.is_valid(document) for document in documents}
    assert answers == {True, False}
    for document in documents:
        text = json.dumps(document)
        assert MATCH.accepts(grammar, text) is validator.is_valid(document), text


def test_an_object_that_lists_its_properties_has_no_others() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for closed in (True, False):
        grammar = compile_form("json", schema, closed=closed)
        assert MATCH.accepts(grammar, '{"a": 1}')
        assert MATCH.accepts(grammar, '{"a": 1, "b": 2}') is not closed


@pytest.mark.parametrize("indent", [None, 0, 2, 4, "\t"])
def test_json_may_be_written_as_people_write_it(indent: int | str | None) -> None:
    grammar = compile_form("json", {"type": "array"})
    deep = [1, [{"a": [[2], {}]}]]
    for separators in ((",", ":"), (",", ": "), None):  # None is the writer's default
        text = json.dumps(deep, indent=indent, separators=separators)
        assert MATCH.accepts(grammar, text)
        assert MATCH.accepts(grammar, text.replace("\n", "\r\n"))


@pytest.mark.parametrize("blank", [" ", "\n", "\t", "\r\n"])
def test_blanks_are_not_repeated_between_values(blank: str) -> None:
    """Which weak models do without end where the form allows it."""
    grammar = compile_form("json", {"type": "array"})
    for text in (f"[1,{blank * 2}2]", f"[{blank * 2}1]", f"[1{blank * 2}]", f"[1]{blank}"):
        assert not MATCH.accepts(grammar, text), text
    assert not MATCH.accepts(grammar, "[1,\n" + " " * 21 + "2]")


def test_a_request_says_which_white_space_it_takes() -> None:
    schema = {"type": "array"}
    none = compile_form("json", schema, whitespace="")
    assert MATCH.accepts(none, "[1,2]") and not MATCH.accepts(none, "[1, 2]")
    own = compile_form("json", schema, whitespace="_{2}")
    assert MATCH.accepts(own, "[1,__2]") and not MATCH.accepts(own, "[1, 2]")


@pytest.mark.parametrize(
    "expression", [r"^[a-z]{2,3}$", r"a|bc?", r"(\d+,)*\d", r"[^/]+/\.x", r"(?i)ab", r"\$"]
)
def test_an_expression_matches_the_whole_answer(expression: str) -> None:
    grammar = compile_form("regex", expression)
    texts = ["ab", "abc", "abcd", "a", "bc", "1,2", "1,", "x/.x", "aB", "$", "中"]
    for text in texts:
        assert MATCH.accepts(grammar, text) is bool(re.fullmatch(expression, text)), text


def test_a_choice_is_one_of_its_texts() -> None:
    choices = ["yes", "no", "yes, but", '"\\\n', "<tool call>", "图"]
    grammar = compile_form("choice", choices)
    for text in [*choices[:4], "图"]:
        assert MATCH.accepts(grammar, text), text
    for text in ("ye", "yes,", "yesno", ""):
        assert not MATCH.accepts(grammar, text), text


def test_thousands_of_choices_can_be_followed() -> None:
    grammar = compile_form("choice", [f"choice {i}" for i in range(5000)])
    assert MATCH.accepts(grammar, "choice 4999") and not MATCH.accepts(grammar, "choice 5000")
    grammar = compile_form("json", {"enum": [f"value {i}" for i in range(5000)]})
    assert MATCH.accepts(grammar, '"value 4999"') and not MATCH.accepts(grammar, '"value 5000"')


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" inner ")"\ninner: start | /[0-9]+/',
        'root ::= "(" inner ")"\ninner ::= root | [0-9]+\n',
    ],
)
def test_grammars_in_both_notations(grammar: str) -> None:
    found = compile_form("grammar", grammar)
    assert MATCH.accepts(found, "((12))")
    assert not MATCH.accepts(found, "((12)") and not MATCH.accepts(found, "()")


ADDED = {"<tool call>": token_id(TOKENIZER, "<tool call>")}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
}
STRUCTURES = {
    "structures": [
        {"begin": "<function=f>", "schema": ARGUMENTS, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "null"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<tool call>"],
    "tags": [
        {
            "begin": "<tool call>",
            "content": {"type": "json_schema", "json_schema": ARGUMENTS},
            "end": "!",
        }
    ],
}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
TAGS: list[tuple[Any, list[str], list[str]]] = [
    (STRUCTURES,
     ["", "text < alone", 'Well: <function=f>{"x": 1}</function> and <function=g>null</function>.'],
     ["<function=f>{}</function>", "<function=h>null</function>", '<function=f>{"x": 1}', "a <function="]),
    ({"format": TRIGGERED}, ["", "text", 'a<tool call>{"x": 1}! b'], ["<tool call>{}!", "a<tool call>"]),
    ({"format": {**TRIGGERED, "at_least_one": True}}, ['a<tool call>{"x": 1}!'], ["", "text"]),
    ({"format": {**TRIGGERED, "stop_after_first": True, "at_least_one": True}}, ['a<tool call>{"x": 1}!'],
     ['a<tool call>{"x": 1}! b', "text"]),
    ({"format": {"type": "sequence", "elements": [
        THOUGHT, {"type": "or", "elements": [{"type": "const_string", "value": "A"},
                                             {"type": "regex", "pattern": "[0-9]"}]}]}},
     ["<think>so</think>A", "<think></think>7"], ["A", "<think>so", "<think>so</think>B"]),
    ({"format": {"type": "tags_with_separator", "separator": ",", "tags": [
        {"begin": "(", "content": {"type": "grammar", "grammar": 'root ::= "x" | "y"'}, "end": ")"}]}},
     ["", "(x)", "(x),(y)"], ["(x)(y)", "(z)", "(x),"]),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "good", "bad"), TAGS, ids=lambda v: str(v)[:40])
def test_structural_tags(tag: Any, good: list[str], bad: list[str]) -> None:
    grammar = compile_form("structural_tag", tag, added_tokens=ADDED)
    assert [text for text in good if not MATCH.accepts(grammar, text)] == []
    assert [text for text in bad if MATCH.accepts(grammar, text)] == []


def test_tokens_that_begin_with_a_space_may_begin_an_answer_where_it_is_not_shown() -> None:
    """As those of SentencePiece do: a model that knows "▁the" does not write "the" without it."""
    tokenizer: Tokenizer = sentencepiece_like_tokenizer()
    accepts = Acceptor(tokenizer, "</s>").accepts
    for kind, value, text in (
        ("choice", ["the", "is"], "the"),
        ("json", {"type": "null"}, "null"),
    ):
        with_space = compile_form(kind, value, with_space=True)  # type: ignore[arg-type]
        assert accepts(with_space, text)  # the tokenizer puts one before it
        without = compile_form(kind, value)  # type: ignore[arg-type]
        assert not accepts(without, text)


def test_an_answer_is_json_or_calls() -> None:
    calls = calls_form(
        FORMATS["hermes"], {"look": {"type": "object", "properties": {}}}, single=True
    )
    grammar = compile_form("json", INVOICE, calls=calls)
    good = json.dumps({"name": "a", "lines": [{"price": 1}]})
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert MATCH.accepts(grammar, good)
    assert MATCH.accepts(grammar, call)
    for wrong in ("{}", call + good, good + call, call.replace("look", "hear"), "Hello"):
        assert not MATCH.accepts(grammar, wrong), wrong
