"""Answers in the forms of the table are divided into what was written into them, however they are cut."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from shared.errors import InvalidRequest
from shared.output_format.deltas import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Reasoning,
)
from shared.output_format.detect import find_calls, find_reasoning
from shared.output_format.fold import MessageFold
from shared.output_format.markers import TokenMarkers
from shared.output_format.table import FORMATS, REASONING
from tests.support.output_format import WRITTEN, Call

TOOLS: dict[str, Any] = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
            "unit": {"enum": ["C", "F"]},
            "note": {"type": ["string", "null"]},
        }
    },
    "stop": {},
}
_TEXTS = ["Łódź", 'a "b" \\n c', "天气 😀", "{x: [1]}", "</b> <c", "", " x ", "two\nlines", "\\"]


def random_call(draw: random.Random, at_most: int = 5) -> Call:
    if draw.random() < 0.2:
        return "stop", {}
    values = {
        "city": draw.choice(_TEXTS),
        "days": draw.randint(-3, 10**12),
        "where": {"a": [1.5, None, True, draw.choice(_TEXTS)], "b": {}},
        "unit": draw.choice("CF"),
        "note": draw.choice([None, "none", "text"]),
    }
    keys = draw.sample(list(values), draw.randint(0, at_most))
    return "get_weather", {key: values[key] for key in keys}


def markers(name: str, reasoning: str, as_tokens: bool) -> TokenMarkers:
    row, thinks = FORMATS[name], REASONING[reasoning]
    texts = (*row.markers(), thinks.open, thinks.close)
    if not as_tokens:
        return TokenMarkers({}, texts)
    names = [text for text in texts if text[0] in "<[" and text[-1] in ">]"]
    names += ["<|action_start|>", "<|plugin|>"]
    return TokenMarkers({text: number for number, text in enumerate(names)}, texts)


def folded(name: str, pieces: Iterable[str], marks: TokenMarkers, **more: Any) -> list[Delta]:
    fold = MessageFold(FORMATS[name], REASONING["think"], marks, tools=TOOLS, **more)
    found = [delta for piece in pieces for delta in fold.push(piece)]
    return found + fold.finish()


def parts(deltas: Sequence[Delta]) -> tuple[str, str, list[list[str]], int]:
    """Content, reasoning, the name and arguments of each call, and how many of them are whole."""
    content = "".join(d.text for d in deltas if isinstance(d, Content))
    reasoning = "".join(d.text for d in deltas if isinstance(d, Reasoning))
    calls = [[d.name, ""] for d in deltas if isinstance(d, CallBegin)]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            calls[delta.call][1] += delta.text
    return content, reasoning, calls, sum(isinstance(d, CallEnd) for d in deltas)


def random_answer(draw: random.Random, name: str) -> tuple[str, str, str, list[Call]]:
    """An answer, and what it is made of."""
    calls = [random_call(draw) for _ in range(draw.randint(1, 3))]
    thought = draw.choice(["", "hm <tool_ca", "two\n\nlines"])
    content = "" if FORMATS[name].at_start else draw.choice(["", "Let me see: <b> [x]", "天气"])
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return f"{text}{content}\n{WRITTEN[name](draw, calls)}", thought, content, calls


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_was_written_comes_out(name: str, as_tokens: bool) -> None:
    marks = markers(name, "think", as_tokens)
    for seed in range(40):
        draw = random.Random(seed)
        text, thought, content, calls = random_answer(draw, name)
        found = parts(folded(name, [marks.within(text)], marks))
        assert found[:2] == (content, thought), text
        got = [(called, json.loads(arguments)) for called, arguments in found[2]]
        assert got == calls and found[3] == len(calls), text


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_deltas_after_each_character_depend_on_the_text_before_alone(
    name: str, as_tokens: bool
) -> None:
    marks = markers(name, "think", as_tokens)
    for seed in range(4):
        draw = random.Random(seed)
        answer = random_answer(draw, name)[0]
        if seed % 2:  # broken somewhere
            place = draw.randrange(len(answer))
            answer = answer[:place] + draw.choice(['"', "}", "<", ""]) + answer[place + 3 :]
        text = marks.within(answer)
        fold = MessageFold(FORMATS[name], REASONING["think"], marks, tools=TOOLS)
        before: list[Delta] = []
        for cut, char in enumerate(text):
            if cut % 3:
                before += fold.push(char)
                continue
            # Another fold takes what the client has as one piece.
            other = MessageFold(FORMATS[name], REASONING["think"], marks, tools=TOOLS)
            assert parts(other.push(text[:cut])) == parts(before), (cut, text)
            if cut % 12 == 0:
                rest = other.push(text[cut:]) + other.finish()
                assert parts(before + rest) == parts(folded(name, text, marks)), (cut, text)
            before += fold.push(char)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama3_json", "pythonic"}))
def test_spelled_markers_of_a_model_with_marker_tokens_are_text(name: str) -> None:
    marks = markers(name, "think", True)
    text = WRITTEN[name](random.Random(1), [("stop", {})])
    content, _, calls, _ = parts(folded(name, [text], marks))
    assert content.strip() == text.strip() and not calls


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_a_start_that_is_no_call_of_a_tool_is_text(name: str) -> None:
    marks = markers(name, "think", False)
    for text in (
        '{"name": "other", "parameters": {}}',
        "[other(a=1)] and",
        '{"a": 1} [x',
        "[1, 2]",
    ):
        for pieces in ([text], list(text)):
            assert parts(folded(name, pieces, marks)) == (text, "", [], 0)


def test_transformers_reads_the_same() -> None:
    """By a `response_template` for Qwen's form, as checkpoints bring them."""
    template: dict[str, Any] = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"repeats": True, "join": ""},
            "reasoning_content": {"open": "<think>\n", "close": "\n</think>\n\n"},
            "tool_calls": {
                "open": "<tool_call>\n",
                "close": "\n</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    marks = markers("hermes", "think", False)
    for seed in range(20):
        draw = random.Random(seed)
        text, _, _, calls = random_answer(draw, "hermes")
        theirs = parse_response(text, template, prefix="<|im_start|>assistant\n")
        content, thought, ours, _ = parts(folded("hermes", [text], marks))
        assert (theirs.get("reasoning_content") or "").strip() == thought
        assert (theirs.get("content") or "").strip() == content
        got = [call["function"] for call in theirs.get("tool_calls", [])]
        assert [(c["name"], c["arguments"]) for c in got] == calls
        assert [(name, json.loads(text)) for name, text in ours] == calls


def test_arguments_come_as_they_are_written() -> None:
    marks = markers("qwen3_coder", "think", False)
    fold = MessageFold(FORMATS["qwen3_coder"], None, marks, tools=TOOLS)
    begin = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    assert parts(fold.push(begin))[2] == [["get_weather", '{"city": "']]
    assert fold.push('Paris "a') == [CallArguments(0, 'Paris \\"a')]
    fold = MessageFold(FORMATS["hermes"], None, marks, tools=TOOLS)
    assert fold.push('<tool_call>{"name": "stop", "argu') == [CallBegin(0, "stop")]
    assert fold.push('ments": {"a": [1') == [CallArguments(0, '{"a": [1')]


TEMPLATES = [
    ("{{ '<tool_call>' }}<function=x>", "qwen3_coder", None),
    ("<tool_call></think>", "hermes", "think"),
    ("<tool_call><arg_key>", "glm45", None),
    ("[TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
    ("[TOOL_CALLS] [ARGS]", "mistral_args", None),
    (FORMATS["deepseek_v3"].open + "```json", "deepseek_v3", None),
    (FORMATS["deepseek_v3"].open, "deepseek_v31", None),
    ("<|action_start|><|plugin|>", "internlm2", None),
    ("<|python_tag|>", "llama3_json", None),
    ("{{ messages }}", None, None),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), TEMPLATES)
def test_a_chat_template_tells_the_form(
    template: str, calls: str | None, reasoning: str | None
) -> None:
    found = find_calls("auto", template), find_reasoning("auto", template)
    assert [row and row.name for row in found] == [calls, reasoning]


def test_forms_are_known_by_other_names_too() -> None:
    row = find_calls("qwen3_xml", None)
    assert row is not None and row.name == "qwen3_coder"
    thinks = find_reasoning("deepseek_r1", None)
    assert thinks is not None and thinks.close == "</think>"
    assert find_calls("none", "<tool_call>") is None
    with pytest.raises(InvalidRequest, match=r"--tool-call-parser 'x'.*hermes"):
        find_calls("x", None)
    with pytest.raises(InvalidRequest, match=r"--reasoning-parser 'x'.*think"):
        find_reasoning("x", None)
