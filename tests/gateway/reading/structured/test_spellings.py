"""Each spelling of a form, as one form; and what is refused of them, by the name of its field."""

import json
from typing import Any

import pytest

from services.gateway.api.openai import requests
from services.gateway.api.openai.schema import ChatRequest, CompletionRequest
from services.gateway.decoding.decode import decode
from services.gateway.reading.constraint import LONGEST, Constraint
from shared.errors import InvalidRequest
from tests.support.gateway.served_model import model

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def form_of(**body: Any) -> Constraint | None:
    """Of a chat; of a completion it is the same."""
    chat = {"messages": [{"role": "user", "content": "hello"}], **body}
    [completion] = requests.read_completions(
        decode(json.dumps({"prompt": "hello", **body}).encode(), CompletionRequest), model()
    )
    request = requests.read_chat(decode(json.dumps(chat).encode(), ChatRequest), model())
    assert completion.constraint == request.constraint
    return request.constraint


def json_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


SPELLINGS: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"response_format": json_format(schema=SCHEMA)}, "response_format.json_schema.schema", "json", SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema", "json", SCHEMA),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format.value", "json", SCHEMA),
    ({"response_format": {"type": "json", "value": SCHEMA}}, "response_format.value", "json", SCHEMA),
    ({"response_format": {"type": "regex", "value": "[a-z]"}}, "response_format.value", "regex", "[a-z]"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json", {"type": "object"}),
    ({"response_format": {"type": "structural_tag", **TAG}}, "response_format", "structural_tag", TAG),
    ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format",
     "structural_tag", {"format": {"type": "any_text"}}),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "json", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", "json", json.dumps(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "json", {"type": "object"}),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", "choice", ["a", "b"]),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "structured_outputs.grammar", "grammar", "start: /a/"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structured_outputs.structural_tag",
     "structural_tag", json.dumps(TAG)),
    ({"guided_json": SCHEMA}, "guided_json", "json", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "guided_json", "json", json.dumps(SCHEMA)),
    ({"guided_json_object": True}, "guided_json_object", "json", {"type": "object"}),
    ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
    ({"guided_choice": ["a"]}, "guided_choice", "choice", ["a"]),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "grammar", 'root ::= "a"'),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag", "structural_tag", json.dumps(TAG)),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}, "guided_choice": None},
     "guided_json", "json", SCHEMA),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "kind", "value"), SPELLINGS, ids=lambda v: str(v)[:50])
def test_each_spelling_is_one_form(body: dict[str, Any], field: str, kind: str, value: Any) -> None:
    found = form_of(**body)
    assert found is not None
    assert (found.field, found.kind, json.loads(found.json)) == (field, kind, value)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"guided_json_object": False},
    ],
    ids=str,
)
def test_none_is_none(body: dict[str, Any]) -> None:
    assert form_of(**body) is None


def test_objects_are_closed_unless_that_is_refused() -> None:
    def found(**body: Any) -> tuple[bool, bool]:
        form = form_of(**body)
        assert form is not None
        return form.closed, form.lenient

    for strict in (None, True):
        assert found(response_format=json_format(schema=SCHEMA, strict=strict)) == (True, False)
    assert found(response_format=json_format(schema=SCHEMA, strict=False)) == (False, True)
    assert found(guided_json=SCHEMA) == (True, False)
    outputs: dict[str, Any] = {"json": SCHEMA, "disable_additional_properties": False}
    assert found(structured_outputs=outputs) == (False, False)


def test_white_space_is_the_clients_where_it_says_so() -> None:
    def found(**body: Any) -> str | None:
        form = form_of(**body)
        assert form is not None
        return form.whitespace

    assert found(guided_json=SCHEMA) is None
    assert found(guided_json=SCHEMA, guided_whitespace_pattern=" ?") == " ?"
    assert found(structured_outputs={"json": SCHEMA, "whitespace_pattern": " ?"}) == " ?"
    assert found(structured_outputs={"json_object": True, "disable_any_whitespace": True}) == ""


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format", "CONFLICTING_CONSTRAINTS"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "CONFLICTING_CONSTRAINTS"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json", "CONFLICTING_CONSTRAINTS"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
     "structured_outputs.whitespace_pattern", "CONFLICTING_CONSTRAINTS"),
    ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "INVALID_VALUE"),
    ({"guided_json": {}, "use_beam_search": True, "n": 2}, "use_beam_search", "INVALID_VALUE"),
    ({"response_format": "json"}, "response_format", "INVALID_TYPE"),
    ({"response_format": {}}, "response_format.type", "INVALID_VALUE"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "INVALID_VALUE"),
    ({"response_format": {"type": "json"}}, "response_format.value", "INVALID_VALUE"),
    ({"response_format": {"type": "regex", "value": 3}}, "response_format.value", "INVALID_VALUE"),
    ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.schema",
     "CONFLICTING_CONSTRAINTS"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "INVALID_VALUE"),
    ({"response_format": json_format()}, "response_format.json_schema.schema", "INVALID_VALUE"),
    ({"response_format": json_format(strict="yes")}, "response_format.json_schema.strict", "INVALID_TYPE"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "INVALID_VALUE"),
    ({"structured_outputs": {"disable_additional_properties": True}}, "structured_outputs", "INVALID_VALUE"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace", "INVALID_VALUE"),
    ({"guided_choice": []}, "guided_choice", "INVALID_VALUE"),
    ({"guided_choice": [1]}, "guided_choice[0]", "INVALID_TYPE"),
    ({"guided_regex": ""}, "guided_regex", "INVALID_VALUE"),
    ({"guided_regex": 3}, "guided_regex", "INVALID_TYPE"),
    ({"guided_grammar": "start: /" + "a" * LONGEST + "/"}, "guided_grammar", "INVALID_VALUE"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "reason"), WRONG, ids=lambda v: str(v)[:50])
def test_a_refusal_names_its_field(body: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form_of(**body)
    assert (caught.value.metadata["field"], caught.value.reason) == (field, reason)
    assert caught.value.message.startswith(field) and len(caught.value.message) < 300


def test_a_form_is_copied_for_each_prompt_within_a_limit() -> None:
    def read(prompts: int, size: int) -> None:
        body = {"prompt": ["x"] * prompts, "guided_regex": "a" * size}
        requests.read_completions(decode(json.dumps(body).encode(), CompletionRequest), model())

    read(16, LONGEST - 2)
    read(128, 30_000)
    with pytest.raises(InvalidRequest, match="guided_regex holds too much for 128 prompts"):
        read(128, 40_000)


def test_a_conflict_names_both() -> None:
    with pytest.raises(InvalidRequest) as caught:
        form_of(response_format={"type": "json_object"}, guided_json={})
    assert caught.value.message == (
        "response_format and guided_json both constrain the answer: give one"
    )
