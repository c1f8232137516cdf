"""Calls that are cut off before the model has named the tool: nothing of them is shown as text."""

import json
import random
from typing import Any

import pytest

from shared.output_format.deltas import Delta
from shared.output_format.fold import End, MessageFold
from shared.output_format.markers import TokenMarkers
from shared.output_format.table import FORMATS, REASONING
from tests.shared.output_format.test_fold import TOOLS, markers, parts, random_call
from tests.support.gateway.marked_model import MARKED
from tests.support.gateway.stage import Stage
from tests.support.network.sse import events
from tests.support.output_format import WRITTEN, Plain

STAGED_MODEL = MARKED
CONTENT = "Let me see: <b> [x] {1}"
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in TOOLS]


def folded(name: str, marks: TokenMarkers, text: str, end: End) -> list[Delta]:
    fold = MessageFold(FORMATS[name], None, marks, tools=TOOLS)
    return fold.push(text) + fold.finish(end)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_no_part_of_a_call_is_text_wherever_the_answer_is_cut_off(
    name: str, as_tokens: bool
) -> None:
    marks = markers(name, "think", as_tokens)
    draw = random.Random(7)
    for _ in range(6):
        content = "" if FORMATS[name].at_start else CONTENT
        calls = [random_call(draw) for _ in range(2)]
        text = marks.within(f"{content}\n{WRITTEN[name](Plain(), calls)}".lstrip())
        begun = len(content)
        for cut in range(len(text) + 1):
            found, _, given, _ = parts(folded(name, marks, text[:cut], End.CUT_OFF))
            # Of the text itself what may begin a marker is not given, "[" for instance.
            assert text[: min(cut, begun + 1)].startswith(found), cut
            if cut > begun + 1:
                assert found == content, cut
            assert [called for called, _ in given] == [called for called, _ in calls][: len(given)]


@pytest.mark.parametrize("name", FORMATS)
def test_at_a_stop_string_a_begun_call_is_left_out_and_text_is_not(name: str) -> None:
    marks, row = markers(name, "think", False), FORMATS[name]
    opened = row.around[0] if row.around else row.open
    assert parts(folded(name, marks, f"x {opened}", End.AT_STOP))[0].strip() == "x"
    # What only looks like the beginning of a marker goes on otherwise: with the stop string, or not at all.
    for end in (End.AT_STOP, End.BY_ITSELF):
        assert parts(folded(name, marks, f"x {opened[:-1]}", end))[0] == f"x {opened[:-1]}"
    assert parts(folded(name, marks, f"x {opened[:2]} y", End.CUT_OFF))[0] == f"x {opened[:2]} y"


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_json_that_is_the_answer_is_given_where_it_is_cut_off(name: str) -> None:
    marks = markers(name, "think", False)
    for text in ('{"answer": "so', '{"names": ["x"', "[1, 2", "[x for x"):
        assert parts(folded(name, marks, text, End.CUT_OFF))[0] == text
    begun = {"llama3_json": '{"name": "sto', "pythonic": "[stop("}[name]
    assert parts(folded(name, marks, begun, End.CUT_OFF)) == ("", "", [], 0)


def test_thoughts_that_are_cut_off_stay() -> None:
    marks = markers("hermes", "think", False)
    fold = MessageFold(FORMATS["hermes"], REASONING["think"], marks, tools=TOOLS)
    found = fold.push("<think>hm <tool_call>{") + fold.finish(End.CUT_OFF)
    assert parts(found)[:2] == ("", "hm <tool_call>{")


async def test_streams_and_whole_replies_agree_at_every_token(stage: Stage) -> None:
    call = json.dumps({"name": "stop", "arguments": {}})
    ids = stage.says(f"One.\n<tool_call>\n{call}\n</tool_call>")
    for most in range(1, len(ids)):
        body: Any = {"tools": CHAT_TOOLS, "max_tokens": most}
        whole = (await stage.chat(**body)).json()["choices"][0]
        assert whole["finish_reason"] == "length"
        message = whole["message"]
        chunks = events((await stage.chat(**body, stream=True)).text)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        assert "One.".startswith((message["content"] or "").strip())
        streamed = [one for delta in deltas for one in delta.get("tool_calls", [])]
        assert bool(streamed) == bool(message.get("tool_calls"))
        response = await stage.http.post(
            "/v1/responses",
            json={"input": "x", "max_output_tokens": most, "tools": [{"type": "function", "name": "stop"}]},
        )  # fmt: skip
        texts = [
            one["content"][0]["text"]
            for one in response.json()["output"]
            if one["type"] == "message"
        ]
        assert "".join(texts) == (message["content"] or ""), most
