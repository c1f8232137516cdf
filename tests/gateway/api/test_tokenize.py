"""Fields of /tokenize and /detokenize are done or refused by name: none is ignored."""

import json
from typing import Any

import pytest

from tests.support.gateway.stage import Stage

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "x"}}]


async def test_the_texts_of_tokens_are_those_of_the_vocabulary(stage: Stage) -> None:
    words = "The red 🦊"
    encoding = stage.tokenizer.encode(words)
    for path in ("/tokenize", "/v1/tokenize", "/tokenize/"):
        reply = await stage.http.post(path, json={"prompt": words, "return_token_strs": True})
        assert reply.json()["token_strs"] == encoding.tokens
        assert reply.json()["tokens"] == encoding.ids
    for change in ({}, {"return_token_strs": False}):
        reply = await stage.http.post("/tokenize", json={"prompt": words, **change})
        assert "token_strs" not in reply.json()
    reply = await stage.http.post(
        "/tokenize", json={"messages": MESSAGES, "return_token_strs": True}
    )
    assert len(reply.json()["token_strs"]) == reply.json()["count"]


async def test_what_a_prompt_depends_on_reaches_preprocess(stage: Stage) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        for given in (None, True, False):
            reply = await stage.http.post(path, json={**body, "add_special_tokens": given})
            assert reply.status_code == 200
            seen = stage.preprocess.seen[-1]
            told = seen.add_special_tokens if seen.HasField("add_special_tokens") else None
            assert told is given, path
    body = {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": False}
    assert (await stage.http.post("/tokenize", json=body)).status_code == 200
    seen = stage.preprocess.seen[-1]
    assert json.loads(seen.conversation.tools_json) == TOOLS
    assert not seen.conversation.add_generation_prompt


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"prompt": "x", "max_length": 5}, "max_length"),
    ("/tokenize", {"messages": MESSAGES, "return_offsets": True}, "return_offsets"),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": "x", "tools": TOOLS}, "tools"),
    ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ("/tokenize", {"prompt": "x", "mm_processor_kwargs": 1}, "mm_processor_kwargs"),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": "x", "documents": [{}]}, "documents"),
    ("/tokenize", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
    ("/detokenize", {}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_not_done_is_refused_by_name(
    stage: Stage, path: str, body: dict[str, Any], field: str
) -> None:
    reply = await stage.http.post(path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(field)
    assert not stage.preprocess.seen


async def test_what_is_off_is_taken(stage: Stage) -> None:
    off = {
        "continue_final_message": False, "chat_template": None, "mm_processor_kwargs": None, "tools": None,
        "chat_template_kwargs": None,
    }  # fmt: skip
    for body in ({"prompt": "x"}, {"messages": MESSAGES}):
        assert (await stage.http.post("/tokenize", json={**body, **off})).status_code == 200
