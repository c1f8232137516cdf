"""Calls of tools that take one text, in each form: what a grammar allows is what is read, however it is cut."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.reading.calls.custom_tools import CustomTool
from services.gateway.reading.structured.errors import FormError
from shared.output_format.custom_input import InputReader
from shared.output_format.deltas import CallArguments, CallBegin, CallEnd, Delta
from shared.output_format.fold import MessageFold
from shared.output_format.grammar import ANY_ARGUMENTS, calls_form, text_or_calls_form
from shared.output_format.table import FORMATS, Body
from tests.shared.output_format.test_fold import markers, parts
from tests.shared.output_format.test_grammar import DEMANDED, END, made
from tests.support.gateway.forms import Acceptor, compile_form
from tests.support.output_format import WRITTEN, Call, Plain

LINES = 'start: line+ "end"\nline: /[^\\n]*/ NL\nNL: "\\n"\n'
TOOLS = {
    "run": CustomTool("run"),
    "lines": CustomTool("lines", "", "lark", LINES, "tools[1].definition"),
    "code": CustomTool(
        "code", "", "regex", r'[a-z]+ = (?:"[^"\n]*"|<\d+>)\n?', "tools[2].definition"
    ),
}
INPUTS = {
    "run": ["", "ls -l", 'a "b" \\ c\n\td', "天气 😀 </b>", "\n", "{x", "\x07"],
    "lines": ["one\nend", 'a "b"\n\n\\n\t<c>\nend', "天气\x01\nend", "</parameter>\nend"],
    "code": ['ab = "x y"', "ab = <12>", 'x = "天\\"\n', 'x = ""'],
}
WRONG = {"lines": ["end", "one\nend.", "one end"], "code": ["ab = 1", ' ab = ""', 'ab = "\n"']}


def written(name: str, calls: list[tuple[str, str]]) -> str:
    """Calls as models write them; where a row has arguments as they are, the input of `lines` is JSON."""
    is_raw = FORMATS[name].body is Body.XML
    listed: list[Call] = []
    for tool, text in calls:
        given = json.dumps(text, ensure_ascii=False) if is_raw and tool == "lines" else text
        listed.append((tool, {"input": given}))
    return WRITTEN[name](Plain(), listed).strip()


def fold(name: str, marks: Any) -> MessageFold:
    row = FORMATS[name]
    schemas = {tool.name: tool.schema(row) for tool in TOOLS.values()}
    custom = {tool.name: tool.is_quoted(row) for tool in TOOLS.values()}
    return MessageFold(row, None, marks, tools=schemas, custom=custom)


def grammar(name: str, tokenizer: Tokenizer, *, may_be_text: bool = False) -> str:
    row = FORMATS[name]
    schemas: dict[str, Any] = {tool.name: tool.schema(row) for tool in TOOLS.values()}
    inputs = {tool.name: tool.form() for tool in TOOLS.values() if tool.syntax}
    if may_be_text:
        schemas["other"] = ANY_ARGUMENTS
        form = text_or_calls_form(row, schemas, inputs=inputs)
    else:
        form = calls_form(row, schemas, single=False, inputs=inputs)
    added = {t.content: number for number, t in tokenizer.get_added_tokens_decoder().items()}
    return compile_form("structural_tag", {"format": form}, lenient=True, added_tokens=added)


def drawn(draw: random.Random) -> list[tuple[str, str]]:
    tools = draw.choices(list(INPUTS), k=draw.randint(1, 3))
    return [(tool, draw.choice(INPUTS[tool])) for tool in tools]


def is_given(name: str, tool: str, text: str) -> bool:
    """Whether a row can carry an input: a marker ends what is written as it is."""
    return FORMATS[name].body is not Body.XML or tool == "lines" or "</parameter>" not in text


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_inputs_come_out_as_they_were_written_at_every_cut(name: str, as_tokens: bool) -> None:
    marks = markers(name, "think", as_tokens)
    for seed in range(12):
        calls = [one for one in drawn(random.Random(seed)) if "</parameter>" not in one[1]]
        calls = calls or [("run", "x")]
        text = marks.within(written(name, calls))
        whole = fold(name, marks)
        deltas = whole.push(text) + whole.finish()
        found = parts(deltas)
        assert [(tool, given) for tool, given in found[2]] == calls
        assert found[3] == len(calls) and not found[0]
        assert all(d.is_custom for d in deltas if isinstance(d, CallBegin | CallArguments))
        by_char = fold(name, marks)
        before: list[Delta] = []
        for cut, char in enumerate(text):
            if cut % 7 == 0:
                other = fold(name, marks)
                assert parts(other.push(text[:cut])) == parts(before), cut
            before += by_char.push(char)
        assert parts(before + by_char.finish()) == found


def test_inputs_come_as_they_are_made() -> None:
    marks = markers("hermes", "think", False)
    reader = fold("hermes", marks)
    assert reader.push('<tool_call>{"name": "run", "arguments": {"inp') == [
        CallBegin(0, "run", is_custom=True)
    ]
    assert reader.push('ut": "a\\') == [CallArguments(0, "a", is_custom=True)]
    assert reader.push("nb") == [CallArguments(0, "\nb", is_custom=True)]
    assert reader.push('"}}</tool_call>') == [CallEnd(0)]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('"ls -l"', "ls -l"),
        ('{"command": "ls"}', "ls"),
        ('{"a": [1, {"input": "no"}], "input": "yes", "input": "no"}', "yes"),
        ('{"input": ["ls", 1]}', '["ls", 1]'),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ("{}", ""),
        (r'{"input": "\ud83d\ude00\ud83d x\ude00"}', "😀\ufffd x\ufffd"),
        (r'{"input": "\/\u00e9\q"}', "/éq"),
        ('{"input": "\\uzzzz"}', ""),
    ],
)
def test_arguments_of_other_shapes_are_inputs_too(arguments: str, given: str) -> None:
    whole, single = InputReader(), InputReader()
    assert whole.push(arguments) + whole.finish() == given
    assert "".join(map(single.push, arguments)) + single.finish() == given


@pytest.mark.parametrize("name", DEMANDED)
def test_grammars_of_inputs_are_kept_in_each_form(name: str) -> None:
    tokenizer, marks = made(name)
    match = Acceptor(tokenizer, END)
    must, may = grammar(name, tokenizer), grammar(name, tokenizer, may_be_text=True)
    for tool, inputs in INPUTS.items():
        for given in filter(lambda text: is_given(name, tool, text), inputs):
            text = written(name, [(tool, given)])
            assert match.accepts(must, text) and match.accepts(may, text), text
            reader = fold(name, marks)
            found = parts(reader.push(marks.within(text)) + reader.finish())
            assert found[2:] == ([[tool, given]], 1)
        for given in WRONG.get(tool, []):
            text = written(name, [(tool, given)])
            assert not match.accepts(must, text) and not match.accepts(may, text), text
    both = written(name, [("code", INPUTS["code"][0]), ("lines", INPUTS["lines"][0])])
    assert match.accepts(must, both) and match.accepts(may, both)


@pytest.mark.parametrize("name", DEMANDED)
def test_text_beside_calls_whose_inputs_are_held_to_a_grammar(name: str) -> None:
    tokenizer, _ = made(name)
    match = Acceptor(tokenizer, END)
    may = grammar(name, tokenizer, may_be_text=True)
    right, wrong = (written(name, [("code", text)]) for text in ('a = ""', "a"))
    other = WRITTEN[name](Plain(), [("other", {"a": [1, {"b": "x"}], "c": "y\nz"})]).strip()
    assert match.accepts(may, "") and match.accepts(may, "Hi <b> [x].\n\nBye")
    assert match.accepts(may, other)
    if not FORMATS[name].at_start:
        assert match.accepts(may, f"See:\n{right}") and match.accepts(may, f"{right}\n{right}")
        assert not match.accepts(may, f"See:\n{wrong}") and not match.accepts(
            may, f"{right}\n{wrong}"
        )
    else:
        assert not match.accepts(may, '{"name": "unknown", "parameters": {}}')


def test_a_grammar_that_cannot_be_kept_names_its_field() -> None:
    tool = CustomTool("x", "", "lark", "start: /(/", "tools[3].custom.format.grammar.definition")
    for definition in (
        "start: /(/",
        "start: missing",
        "nothing",
        "start: %json {}",
        "start: <[1]>",
    ):
        form = calls_form(
            FORMATS["hermes"],
            {"x": {}},
            single=True,
            inputs={"x": {**tool.form(), "definition": definition}},
        )
        with pytest.raises(FormError) as caught:
            compile_form("structural_tag", {"format": form})
        assert caught.value.field == tool.field, definition
