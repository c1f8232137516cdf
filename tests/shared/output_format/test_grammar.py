"""Answers that must call tools: the grammar of a row and its fold agree."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from shared.output_format.deltas import CallArguments, CallBegin, CallEnd
from shared.output_format.fold import MessageFold
from shared.output_format.grammar import (
    behind_reasoning,
    bounded_reasoning,
    calls_form,
    has_grammar,
)
from shared.output_format.markers import TokenMarkers
from shared.output_format.table import FORMATS, REASONING
from tests.support.gateway.forms import Acceptor, compile_form
from tests.support.output_format import WRITTEN, Call, Plain
from tests.support.tokenizers import (
    byte_level_tokenizer,
    sentencepiece_like_tokenizer,
    token_id,
)

END = "<|im_end|>"
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"$ref": "#/$defs/place"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "$defs": {"place": {"type": "object", "properties": {"a": {"type": "array"}}}},
    },
    "stop": {},
}
DEMANDED = [name for name, row in FORMATS.items() if has_grammar(row)]


def made(name: str) -> tuple[Tokenizer, TokenMarkers]:
    """A tokenizer whose tokens the markers are that look like some."""
    tokenizer = byte_level_tokenizer()
    row, thinks = FORMATS[name], REASONING["think"]
    texts = (*row.markers(), thinks.open, thinks.close)
    tokens = [text for text in texts if text[0] in "<[" and text[-1] in ">]" and "=" not in text]
    tokens = [t for t in tokens if t not in ("</parameter>", "</function>", "</invoke>", ">")]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    added = {token: token_id(tokenizer, token) for token in tokens}
    return tokenizer, TokenMarkers(added, texts)


def grammar(name: str, tokenizer: Tokenizer, **more: Any) -> str:
    form = calls_form(FORMATS[name], SCHEMAS, single=more.get("single", False))
    if "in_reasoning" in more:
        opened, most = more["in_reasoning"], more.get("most")
        form = behind_reasoning(form, REASONING["think"], in_reasoning=opened, most=most)
    added = {t.content: number for number, t in tokenizer.get_added_tokens_decoder().items()}
    return compile_form("structural_tag", {"format": form}, lenient=True, added_tokens=added)


def drawn(draw: random.Random) -> tuple[str, dict[str, Any]]:
    if draw.random() < 0.3:
        return "stop", {}
    values = {
        "city": draw.choice(["Łódź", 'a "b" < c', "two\nlines"]),
        "days": draw.randint(-3, 99),
        "where": {"a": [1, "x"]},
        "unit": draw.choice("CF"),
    }
    return "get_weather", {k: v for k, v in values.items() if k == "city" or draw.random() < 0.6}


@pytest.mark.parametrize("name", DEMANDED)
def test_what_is_allowed_is_what_is_written_and_read(name: str) -> None:
    tokenizer, marks = made(name)
    match = Acceptor(tokenizer, END)
    several, one = grammar(name, tokenizer), grammar(name, tokenizer, single=True)
    for seed in range(12):
        draw = random.Random(seed)
        calls = [drawn(draw) for _ in range(draw.randint(1, 3))]
        text = WRITTEN[name](Plain(), calls).strip()
        assert match.accepts(several, text), text
        assert match.accepts(one, text) == (len(calls) == 1)
        assert not match.accepts(several, "Hi. " + text)
        fold = MessageFold(FORMATS[name], None, marks, tools=SCHEMAS)
        deltas = fold.push(marks.within(text)) + fold.finish()
        assert sum(isinstance(delta, CallEnd) for delta in deltas) == len(calls)
        assert not [d for d in deltas if not isinstance(d, CallBegin | CallArguments | CallEnd)]
    others: list[Call] = [("other", {}), ("get_weather", {"city": "x", "days": "many"})]
    for wrong in others:
        text = WRITTEN[name](Plain(), [wrong]).strip()
        assert not match.accepts(several, text), text
    assert not match.accepts(several, "")


def test_thinking_comes_before_calls() -> None:
    tokenizer, _ = made("hermes")
    match = Acceptor(tokenizer, END)
    call = WRITTEN["hermes"](Plain(), [("stop", {})])
    may = grammar("hermes", tokenizer, in_reasoning=False)
    must = grammar("hermes", tokenizer, in_reasoning=True)
    thought = f"hm {json.dumps({})}\n</think>\n\n{call}"
    assert match.accepts(may, f"<think>\n{thought}") and match.accepts(may, call)
    assert match.accepts(must, thought) and not match.accepts(must, call)
    assert not match.accepts(may, thought)


@pytest.mark.parametrize("words", [byte_level_tokenizer, sentencepiece_like_tokenizer])
def test_reasoning_has_no_more_tokens_than_its_bound(words: Callable[[], Tokenizer]) -> None:
    """All else is as without one: other markers come, and text that spells one is text."""
    tokenizer, thinks = words(), REASONING["think"]
    markers = (thinks.open, thinks.close, "<tool_call>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    added = {t.content: number for number, t in tokenizer.get_added_tokens_decoder().items()}
    match = Acceptor(tokenizer, END if tokenizer.token_to_id(END) is not None else "</s>")

    def accepts(most: int, text: str, *, opened: bool) -> bool:
        form = bounded_reasoning(thinks, most, in_reasoning=opened)
        spaced = words is sentencepiece_like_tokenizer
        value = {"format": form}
        made = compile_form("structural_tag", value, added_tokens=added, with_space=spaced)
        return match.accepts(made, text)

    thought = "two words"
    most = len(tokenizer.encode(thought, add_special_tokens=False).ids)
    for begun, opened in (("", True), (thinks.open, False)):
        text = f"{begun}{thought}{thinks.close}Then <tool_call> and < think>."
        assert accepts(most, text, opened=opened) and accepts(most + 1, text, opened=opened)
        assert not accepts(most - 1, text, opened=opened)
        assert accepts(0, f"{begun}{thinks.close}x", opened=opened)
        assert not accepts(most, f"{begun}{thought}{thinks.close}{thinks.open}", opened=opened)
    assert accepts(0, "An answer without a thought <tool_call>", opened=False)
    assert not accepts(most, f"x{thinks.open}{thought}{thinks.close}", opened=False)


def test_thinking_before_calls_has_a_bound_too() -> None:
    tokenizer, _ = made("hermes")
    match = Acceptor(tokenizer, END)
    call = WRITTEN["hermes"](Plain(), [("stop", {})])
    thought = "so many"
    most = len(tokenizer.encode(thought).ids)
    for opened in (False, True):
        text = f"{'' if opened else '<think>'}{thought}</think>\n\n{call}"
        for bound in (most, most - 1):
            bounded = grammar("hermes", tokenizer, in_reasoning=opened, most=bound)
            assert match.accepts(bounded, text) == (bound == most)
