"""Tools reach the chat template as the client wrote them; what is asked of them and cannot be given is refused."""

import json
from typing import Any

import openai
import pytest

from services.gateway.api.openai import requests as openai_requests
from services.gateway.api.openai.schema import ChatRequest as ChatRequestBody
from services.gateway.decoding.decode import decode
from services.gateway.decoding.list_limits import LONGEST_TOOLS
from shared.errors import InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.served_model import model
from tests.support.gateway.stage import ANSWER, MODEL, Stage

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
FUNCTION: Any = {
    "name": "get_weather",
    "strict": True,
    "description": "天气",
    "parameters": {
        "type": "object",
        "properties": {"z": {"minimum": 1.0}, "a": {"enum": [None, 10**30]}},
    },
}
TOOLS: Any = [
    {"type": "function", "function": FUNCTION},
    {"function": {"name": "x"}, "type": "function"},
]


def shown(stage: Stage) -> str:
    """The tools of the last prompt that preprocess got."""
    return stage.preprocess.seen[-1].conversation.tools_json


async def test_the_openai_client_gets_text_beside_tools(stage: Stage) -> None:
    reply = await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="none"
    )
    assert reply.choices[0].message.content == ANSWER
    assert not reply.choices[0].message.tool_calls
    assert json.loads(shown(stage)) == TOOLS
    # A template that writes them writes their names in the client's order, and its numbers.
    assert shown(stage) == json.dumps(TOOLS, ensure_ascii=False)
    await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, functions=[FUNCTION], function_call="none"
    )
    assert json.loads(shown(stage)) == [{"type": "function", "function": FUNCTION}]


async def test_no_tools_are_none(stage: Stage) -> None:
    changes: list[dict[str, Any]] = [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tool_choice": "auto"},
    ]
    for change in changes:
        assert (await stage.chat(**change)).status_code == 200
        assert shown(stage) == ""


def test_they_count_towards_what_a_request_may_cost() -> None:
    """Before anything is rendered."""
    bounds = []
    tools: Any
    for tools in ([], TOOLS):
        body = {"messages": MESSAGES, "max_tokens": 1, "tools": tools, "tool_choice": "none"}
        content = decode(json.dumps(body).encode(), ChatRequestBody)
        bounds.append(openai_requests.read_chat(content, model()).cost_bound(model()))
    assert bounds[1] - bounds[0] >= 100


CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": TOOLS}, "tools", "NO_TOOL_FORMAT"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tools", "NO_TOOL_FORMAT"),
    ({"tools": TOOLS, "tool_choice": None}, "tools", "NO_TOOL_FORMAT"),
    ({"tools": TOOLS, "function_call": "none"}, "tools", "NO_TOOL_FORMAT"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tools", "NO_TOOL_FORMAT"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tools",
        "NO_TOOL_FORMAT",
    ),
    ({"tool_choice": "required"}, "tool_choice", "INVALID_VALUE"),
    ({"functions": [FUNCTION]}, "functions", "UNSUPPORTED_PARAMETER"),
    (
        {"functions": [FUNCTION], "function_call": {"name": "get_weather"}},
        "function_call",
        "UNSUPPORTED_PARAMETER",
    ),
]


@pytest.mark.parametrize(("change", "field", "code"), CALLS, ids=lambda value: str(value)[:60])
async def test_a_call_that_cannot_be_given_is_refused(
    stage: Stage, change: dict[str, Any], field: str, code: str
) -> None:
    """The model of this stage has no chat template that shows how it writes calls."""
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body=change
        )
    error = caught.value
    assert (error.param, error.code) == (field, code.lower())
    body: Any = error.body
    assert body["message"].startswith(field)
    assert not stage.preprocess.seen


SHAPES: list[tuple[Any, str]] = [
    ({}, "tools"),
    ("x", "tools"),
    (["x"], "tools[0]"),
    ([TOOLS[0], {"type": "web_search"}], "tools[1].type"),
    ([{"function": {"name": "x"}}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "n" * 300}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "x", "description": 1}}], "tools[0].function.description"),
    ([{"type": "function", "function": {"name": "x", "parameters": []}}], "tools[0].function.parameters"),
    ([{"type": "function", "function": {"name": "x", "a": float("inf")}}], "tools[0].function.a"),
    ([{"type": "function", "function": {"name": "\ud800"}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "x", "description": "d" * LONGEST_TOOLS}}], "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "field"), SHAPES, ids=lambda value: str(value)[:60])
async def test_tools_of_another_shape_are_named(stage: Stage, tools: Any, field: str) -> None:
    body = json.dumps({"messages": MESSAGES, "tools": tools, "tool_choice": "none"}).encode()
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = await stage.http.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == field and error["message"].startswith(field)
        assert len(error["message"]) < 300
    assert not stage.preprocess.seen


async def test_a_number_beyond_all_bounds_is_refused(stage: Stage) -> None:
    tools = b'[{"type":"function","function":{"name":"x","parameters":{"a":1e400}}}]'
    body = b'{"messages":[{"role":"user","content":"x"}],"tool_choice":"none","tools":%s}'
    reply = await stage.http.post(
        "/v1/chat/completions",
        content=body % tools,
        headers={"content-type": "application/json"},
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


async def test_completions_have_no_tools(stage: Stage) -> None:
    for change, field in (
        ({"tools": TOOLS, "tool_choice": "none"}, "tools"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        reply = await stage.http.post("/v1/completions", json={"prompt": "x", **change})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field)
        assert "is for chat" in error["message"]


async def test_older_names_in_a_conversation_are_refused_with_the_newer_ones(stage: Stage) -> None:
    for message, field, hint in (
        ({"role": "function", "content": "sunny", "name": "x"}, "messages[1].role", '"tool"'),
        (
            {"role": "assistant", "content": "", "function_call": {}},
            "messages[1].function_call",
            "`tool_calls`",
        ),
    ):
        reply = await stage.chat(messages=[*MESSAGES, message])
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field)
        assert hint in error["message"]


async def ask(stage: Stage, tools_json: str, tool_choice: str) -> None:
    turn = ChatMessage(role="user", content=[ContentPart(text="hi")])
    request = ChatRequest(messages=[turn], tools_json=tools_json, tool_choice=tool_choice)
    async with open_channel(stage.gateway.grpc_address) as channel:
        with calling("gateway"):
            async for _ in ChatServiceStub(channel).Chat(request):
                pass


async def test_grpc_takes_them_under_the_same_names(stage: Stage) -> None:
    await ask(stage, json.dumps(TOOLS), "none")
    assert json.loads(shown(stage)) == TOOLS
    await ask(stage, "", "auto")
    assert shown(stage) == ""
    for tools, choice, field in (
        (json.dumps(TOOLS), "", "tools"),
        (json.dumps(TOOLS), "required", "tools"),
        ("[", "none", "tools"),
        ("[" * 100_000, "none", "tools"),
        ('[{"type": "function"}]', "none", "tools[0].function"),
        ('[{"type": "custom", "custom": {"name": "x"}}]', "none", "tools[0].type"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await ask(stage, tools, choice)
        assert caught.value.metadata["field"] == field
