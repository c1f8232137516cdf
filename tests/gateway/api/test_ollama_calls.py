"""Calls of tools and thoughts in Ollama's API: of its own client, whole, streamed and resumed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from services.gateway.gateway import Gateway
from tests.gateway.api.test_ollama import lines_of, without_durations
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.marked_model import ANSWER, FIRST, MARKED, THOUGHT, WEATHER
from tests.support.gateway.stage import MODEL, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS

STAGED_MODEL = MARKED
CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
BODY: Any = {"model": MODEL, "messages": MESSAGES, "stream": False}
CALLS = [("weather", json.loads(WEATHER)), ("stop", {})]


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(stage.gateway.url, verify=False) as opened:
        yield opened


def called(message: ollama.Message) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


async def test_the_ollama_client_gets_calls_and_thoughts(
    stage: Stage, client: ollama.AsyncClient
) -> None:
    whole = await client.chat(MODEL, MESSAGES, tools=TOOLS)
    assert called(whole.message) == CALLS
    assert (whole.message.content, whole.message.thinking) == ("One moment.", THOUGHT)
    assert (whole.done, whole.done_reason) == (True, "stop")
    *parts, last = [
        part async for part in await client.chat(MODEL, MESSAGES, tools=TOOLS, stream=True)
    ]
    assert not any(part.done for part in parts) and last.done and not last.message.tool_calls
    assert [call for part in parts for call in called(part.message)] == CALLS
    assert "".join(part.message.content or "" for part in parts) == "One moment."
    thinking = [part.message.thinking for part in parts if part.message.thinking]
    assert "".join(thinking) == THOUGHT and len(thinking) > 1, "thoughts come as they are made"


async def test_calls_have_ids_and_places(stage: Stage) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stream": False}
    message = (await stage.http.post(CHAT, json=body)).json()["message"]
    [rid] = stage.scheduler.played
    assert [(call["id"], call["function"]["index"]) for call in message["tool_calls"]] == [
        (f"call_{rid}_0_{index}", index) for index in range(2)
    ]


async def test_without_tools_calls_are_text(stage: Stage, client: ollama.AsyncClient) -> None:
    reply = await client.chat(MODEL, MESSAGES)
    assert not reply.message.tool_calls and reply.message.thinking == THOUGHT
    assert "One moment." in (reply.message.content or "")
    generated = await client.generate(MODEL, "What is the weather?")
    assert generated.thinking == THOUGHT and "One moment." in (generated.response or "")
    raw = await client.generate(MODEL, "What is the weather?", raw=True)
    assert raw.thinking is None and (raw.response or "").startswith("<think>")


@pytest.mark.parametrize(
    ("think", "told"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
        (None, None),
    ],
)
async def test_think_is_told_to_the_template(
    stage: Stage, client: ollama.AsyncClient, think: Any, told: Any
) -> None:
    chat = await client.chat(MODEL, MESSAGES, think=think)
    generated = await client.generate(MODEL, "What is the weather?", think=think)
    thought = None if think is False else THOUGHT
    assert chat.message.thinking == generated.thinking == thought
    for request in stage.preprocess.seen[-2:]:
        given = request.conversation.chat_template_kwargs_json
        assert (json.loads(given) if given else None) == told


async def test_what_tools_gave_is_shown_to_the_model(
    stage: Stage, client: ollama.AsyncClient
) -> None:
    """A result without the name of its call is that of the tool's first call without one."""
    first = await client.chat(MODEL, MESSAGES, tools=TOOLS)
    turns = [
        *MESSAGES,
        first.message,
        {"role": "tool", "tool_name": "stop", "content": "stopped"},
        {"role": "tool", "content": "sunny"},
    ]
    await client.chat(MODEL, turns, tools=TOOLS)
    seen = stage.preprocess.seen[-1].conversation
    assert [json.loads(seen.tools_json)[i]["function"]["name"] for i in (0, 1)] == [
        "weather",
        "stop",
    ]
    _, said, stopped, sunny = seen.messages
    calls = json.loads(said.tool_calls_json)
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == CALLS
    assert (said.reasoning, said.content[0].text) == (THOUGHT, "One moment.")
    ids = [call["id"] for call in calls]
    assert len({*ids}) == 2 and [sunny.tool_call_id, stopped.tool_call_id] == ids
    assert (stopped.name, stopped.role, sunny.content[0].text) == ("stop", "tool", "sunny")


async def test_a_call_that_is_cut_off_is_left_out(stage: Stage, client: ollama.AsyncClient) -> None:
    """Nobody should call a tool with half of its arguments; the end says that the answer was cut off."""
    within = len(stage.tokenizer.encode(ANSWER[: ANSWER.index("days")]).ids)
    reply = await client.chat(MODEL, MESSAGES, tools=TOOLS, options={"num_predict": within})
    assert (reply.done_reason, reply.message.tool_calls) == ("length", None)
    closed = len(stage.tokenizer.encode(ANSWER[: ANSWER.index(FIRST) + len(FIRST) - 14]).ids)
    for stream in (False, True):
        body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stream": stream}
        body["options"] = {"num_predict": closed}
        lines = lines_of((await stage.http.post(CHAT, json=body)).text.rstrip("\n") + "\n")
        found = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert [call["function"]["name"] for call in found] == ["weather"], (
            "its arguments are whole"
        )


@pytest.mark.parametrize("arguments", ['{"a":\n\r {"b": "\\ud800"}}', '{"a": 1e999}'])
async def test_arguments_are_the_json_that_the_model_wrote(stage: Stage, arguments: str) -> None:
    stage.says(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    for stream in (True, False):
        reply = await stage.http.post(CHAT, json=body | {"stream": stream})
        assert reply.status_code == 200
        [call] = [
            call
            for line in reply.text.strip().split("\n")
            for call in json.loads(line)["message"].get("tool_calls", ())
        ]
        assert call["function"]["arguments"] == json.loads(arguments)


async def test_a_form_is_of_the_text_beside_calls(stage: Stage, client: ollama.AsyncClient) -> None:
    await client.chat(MODEL, MESSAGES, tools=TOOLS, format=CITY)
    [played] = stage.scheduler.played.values()
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts
    grammar = played.spec.sampling.grammar
    assert accepts(grammar, '{"city": "x"}') and accepts(
        grammar, FIRST.replace(WEATHER, '{"city": "x"}')
    )
    assert not accepts(grammar, "text")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function must be"),
        ({"tools": {}}, "tools must be a list"),
        ({"think": "hardest"}, "think must be"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name is missing",
        ),
        ({"messages": [{"role": "tool"}]}, "messages[0].content is missing"),
    ],
)
async def test_what_is_wrong_is_named(stage: Stage, body: Any, error: str) -> None:
    reply = await stage.http.post(CHAT, json={"messages": MESSAGES, **body})
    assert reply.status_code == 400 and reply.json()["error"].startswith(error), reply.text
    raw = {"prompt": "x", "raw": True, "think": True}
    assert (await stage.http.post(GENERATE, json=raw)).json()["error"].startswith("think cannot")


async def test_capabilities(client: ollama.AsyncClient) -> None:
    shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking", "vision"]


@pytest.mark.parametrize(
    "body", [{"tools": TOOLS}, {"tools": TOOLS, "options": {"num_predict": 130}}, {}]
)
async def test_the_rest_after_every_line_at_another_gateway(
    stage: Stage, other: Gateway, body: dict[str, Any]
) -> None:
    stage.says(ANSWER, size=2)
    asked = {"model": MODEL, "messages": MESSAGES, **body}
    whole = lines_of((await stage.http.post(CHAT, json=asked, headers=ASK_FOR_IDS)).text)
    rid = whole[0]["event_id"].partition("/")[0]
    async with plain_client(other.url, timeout=60) as client:
        for index, line in enumerate(whole[:-1]):
            params = {"after": line["event_id"]}
            rest = await client.get(f"/v1/requests/{rid}/stream", params=params)
            found = lines_of(rest.text)
            assert said(found) == said(whole[index + 1 :]), line
            assert without_durations(found[-1]) == without_durations(whole[-1])


def said(lines: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
    """Text, thoughts and calls of some lines."""
    messages = [line["message"] for line in lines]
    return (
        "".join(message["content"] for message in messages),
        "".join(message.get("thinking", "") for message in messages),
        [call for message in messages for call in message.get("tool_calls", ())],
    )


async def test_log_probabilities_are_those_of_chats(
    stage: Stage, client: ollama.AsyncClient
) -> None:
    chat = await stage.chat(logprobs=True, top_logprobs=2)
    wanted = chat.json()["choices"][0]["logprobs"]["content"]
    asked: Any = {"logprobs": True, "top_logprobs": 2}
    replies: list[Any] = [
        await client.chat(MODEL, MESSAGES, **asked),
        await client.generate(MODEL, "What is the weather?", **asked),
        await client.generate(MODEL, "What is the weather?", raw=True, **asked),
    ]
    for reply in replies:
        assert [one.token for one in reply.logprobs] == [entry["token"] for entry in wanted]
    body = {"model": MODEL, "messages": MESSAGES, **asked}
    whole = (await stage.http.post(CHAT, json=body | {"stream": False})).json()
    lines = lines_of((await stage.http.post(CHAT, json=body)).text)
    assert [entry for line in lines for entry in line.get("logprobs", ())] == wanted
    assert whole["logprobs"] == wanted
    assert "logprobs" not in (await stage.http.post(CHAT, json=BODY)).json()
