"""Anthropic's API: its own client, its events, its errors, and streams that go on elsewhere."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from tokenizers import Tokenizer

from services.gateway.gateway import Gateway
from services.gateway.timings import Timings
from shared.errors import InvalidRequest
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.marked_model import ANSWER, FIRST, MARKED, SECOND, THOUGHT, WEATHER
from tests.support.gateway.stage import MAX_MODEL_LEN, MODEL, Stage, open_stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, NamedEvent, named_events
from tests.support.pictures import png

if TYPE_CHECKING:  # it takes seconds, of which workers that do not run these tests have no use
    from anthropic import AsyncAnthropic

STAGED_MODEL = MARKED
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": MESSAGES}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "天气", "input_schema": SCHEMA},
    {"name": "stop", "type": "custom", "input_schema": {"type": "object"}, "cache_control": None},
]


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator["AsyncAnthropic"]:
    async with anthropic_client(stage) as opened:
        yield opened


def anthropic_client(stage: Stage, **keys: Any) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        base_url=stage.gateway.url,
        max_retries=0,
        http_client=httpx2.AsyncClient(verify=False),
        **(keys or {"api_key": "none"}),
    )


async def test_a_message_of_the_anthropic_client(stage: Stage, client: "AsyncAnthropic") -> None:
    ids = stage.says(ANSWER)
    whole: Any = await client.messages.create(**BODY, tools=TOOLS, system="Be brief.")
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == (
        "message",
        "assistant",
        MODEL,
        "tool_use",
    )
    rid = whole.id.removeprefix("msg_")
    assert rid == [*stage.scheduler.played][-1]
    thought, text, first, second = whole.content
    assert (thought.type, text.type, first.type, second.type) == (
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    )
    assert (thought.thinking, text.text) == (THOUGHT, "One moment.")
    assert (first.id, first.name, first.input) == (
        f"call_{rid}_0_0",
        "weather",
        json.loads(WEATHER),
    )
    assert (second.id, second.name, second.input) == (f"call_{rid}_0_1", "stop", {})
    assert whole.usage.output_tokens == len(ids) and whole.usage.input_tokens > 3
    assert whole.usage.output_tokens_details.thinking_tokens > 3
    seen = stage.preprocess.seen[-1].conversation
    assert [m.role for m in seen.messages] == ["system", "user"] and seen.add_generation_prompt
    shown = [tool["function"] for tool in json.loads(seen.tools_json)]
    assert shown[0] == {"name": "weather", "description": "天气", "parameters": SCHEMA}

    async with client.messages.stream(**BODY, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final: Any = await stream.get_final_message()
    assert kinds.count("input_json") > 10, "arguments come as they are made"
    assert kinds[-1] == "message_stop" and final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.content[2].input == first.input
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    assert final.usage.output_tokens == len(ids)


async def test_why_an_answer_ended(stage: Stage, client: "AsyncAnthropic") -> None:
    stage.says("One, two, END of it.")
    ended = await client.messages.create(**BODY)
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    [block] = ended.content
    assert block.type == "text" and block.text == "One, two, END of it."
    stopped = await client.messages.create(**BODY, stop_sequences=["END"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert [block.to_dict() for block in stopped.content] == [
        {"type": "text", "text": "One, two, "}
    ]
    cut = await client.messages.create(**BODY | {"max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stage.says(FIRST)
    cut = await client.messages.create(**BODY | {"max_tokens": 30}, tools=TOOLS)
    assert cut.stop_reason == "max_tokens" and cut.content[0].to_dict()["name"] == "weather"
    stage.says("")
    assert (await client.messages.create(**BODY)).content == []
    stage.scheduler.cached_tokens = 2
    usage = (await client.messages.create(**BODY)).usage
    assert (usage.cache_read_input_tokens, usage.input_tokens) == (2, ended.usage.input_tokens - 2)


async def test_blocks_become_what_chat_templates_know(
    stage: Stage, client: "AsyncAnthropic"
) -> None:
    picture = png(3)
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(picture).decode(),
    }
    image: Any = {"type": "image", "source": source}
    of_url: Any = {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "x"}}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, image, of_url]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Well.", "citations": None},
                call,
                {**call, "id": "c2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [image], "is_error": True},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]  # fmt: skip
    system: Any = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    body: Any = {**BODY, "messages": turns, "system": system, "tools": TOOLS}
    await client.messages.create(**body)
    seen = stage.preprocess.seen[-1].conversation
    roles = [message.role for message in seen.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [part.text for part in seen.messages[0].content] == ["Be", "brief."]
    text, inline, remote = seen.messages[1].content
    assert (text.text, inline.media.data, remote.media.url) == (
        "See",
        picture,
        "http://example.org/a.png",
    )
    said = seen.messages[2]
    assert (said.reasoning, said.content[0].text) == ("hm", "Well.")
    calls = json.loads(said.tool_calls_json)
    assert [(one["id"], one["function"]["arguments"]) for one in calls] == [
        ("c1", {"city": "x"}),
        ("c2", {}),
    ]
    first, second = seen.messages[3:5]
    assert (first.tool_call_id, first.content[0].text, first.is_string) == ("c1", "sunny", True)
    assert (second.tool_call_id, second.content[0].media.data) == ("c2", picture)
    counted = await client.messages.count_tokens(
        **{name: body[name] for name in ("model", "messages", "system", "tools")}
    )
    asked = [*stage.scheduler.played.values()][-1].spec
    assert counted.input_tokens == len(asked.prompt) // 4


async def test_an_answer_goes_on_with_the_assistants_turn(
    stage: Stage, client: "AsyncAnthropic"
) -> None:
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    await client.messages.create(**BODY | {"messages": turns})
    seen = stage.preprocess.seen[-1].conversation
    assert seen.continue_final_message and not seen.add_generation_prompt


async def test_options_have_anthropics_names(stage: Stage, client: "AsyncAnthropic") -> None:
    await client.messages.create(
        **BODY,
        extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.25},
        stop_sequences=["x"],
        metadata={"user_id": "me"},
        service_tier="standard_only",
        thinking={"type": "enabled", "budget_tokens": 100},
        output_config={"effort": "max"},
    )
    spec = [*stage.scheduler.played.values()][-1].spec
    sampling = spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (400, 0.5, 3)
    assert (sampling.top_p, list(sampling.stop), spec.tenant[0]) == (0.25, ["x"], "u")
    told = json.loads(stage.preprocess.seen[-1].conversation.chat_template_kwargs_json)
    assert told == {"enable_thinking": True, "thinking_budget": 100, "reasoning_effort": "max"}
    thoughts = Acceptor(stage.tokenizer, "<|im_end|>")
    for words, fits in ((" a" * 100, True), (" a" * 101, False)):
        bounded = f"<think>{words}</think>Hi."
        assert thoughts.accepts(sampling.grammar, bounded) == fits
    hidden = await client.messages.create(**BODY, thinking={"type": "disabled"})
    assert [block.type for block in hidden.content] == ["text"]
    told = json.loads(stage.preprocess.seen[-1].conversation.chat_template_kwargs_json)
    assert told == {"enable_thinking": False}


async def test_forms_and_calls_that_have_to_be_made(stage: Stage, client: "AsyncAnthropic") -> None:
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts

    async def grammar_of(**more: Any) -> str:
        await client.messages.create(**BODY, **more)
        return str([*stage.scheduler.played.values()][-1].spec.sampling.grammar)

    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    of_schema = await grammar_of(output_config=form)
    assert accepts(of_schema, '{"city": "x"}') and not accepts(of_schema, "{}")
    stop = SECOND.replace('"}', '", "arguments": {}}')
    weather = FIRST.replace(WEATHER, '{"city": "x"}')
    anyone = await grammar_of(tools=TOOLS, tool_choice={"type": "any"})
    assert accepts(anyone, f"{weather}\n{stop}") and not accepts(anyone, "Hi.")
    named = await grammar_of(tools=TOOLS, tool_choice={"type": "tool", "name": "stop"})
    assert accepts(named, stop) and not accepts(named, weather)
    assert not await grammar_of(tools=TOOLS, tool_choice={"type": "auto"})
    none = await client.messages.create(**BODY, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["thinking", "text"]
    single = await client.messages.create(
        **BODY, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]


def _turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}]}


# Bodies, and what the error begins with.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"wings": 2}, "wings is not a field"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "bird", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
    (_turn("user", {"type": "text"}), "messages[0].content[0].text"),
    (_turn("user", {"type": "text", "text": "x", "wings": 1}), "messages[0].content[0].wings"),
    (_turn("assistant", {"type": "redacted_thinking", "data": "x"}), "messages[0].content[0].type"),
    (_turn("user", {"type": "tool_use", "id": "x", "name": "x", "input": {}}), "messages[0].content[0].type"),
    (_turn("user", {"type": "image", "source": {"type": "base64", "data": "%"}}), "messages[0].content[0].source.data"),
    (_turn("user", {"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.file_id"),
    (_turn("user", {"type": "image", "source": {"type": "url", "url": "x"}}), "messages[0].content[0].source.url"),
    (_turn("user", {"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    (_turn("assistant", {"type": "tool_use", "name": "x", "input": "y"}), "messages[0].content[0].input"),
    (_turn("assistant", {"type": "tool_use", "id": "c", "name": "x", "input": {}}), "messages[0] ends with a call"),
    (_turn("user", {"type": "text", "text": "x", "citations": [{}]}), "messages[0].content[0].citations"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 31}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "often"}}, "thinking.type"),
    ({"output_config": {"effort": "little"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
    ({"metadata": {"user_id": "u" * 600}}, "metadata.user_id"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
]  # fmt: skip


async def test_more_tokens_than_the_length_leaves_are_all_that_it_leaves(stage: Stage) -> None:
    reply = await stage.http.post(PATH, json=BODY | {"max_tokens": 32_000})
    assert reply.status_code == 200, reply.text
    [played] = stage.scheduler.played.values()
    spec = played.spec
    assert spec.sampling.max_tokens == MAX_MODEL_LEN - len(spec.prompt) // 4


async def test_what_is_not_offered_is_refused_by_its_name(stage: Stage) -> None:
    for change, begins in REFUSED:
        reply = await stage.http.post(PATH, json=BODY | change)
        assert error_of(reply) == (400, "invalid_request_error"), reply.text
        assert reply.json()["error"]["message"].startswith(begins), reply.text
    for body in (b"", b"[]", b"{", b"\xff", b'{"max_tokens": "x"}', b"[" * 9999):
        for path in (PATH, COUNT):
            reply = await stage.http.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            assert error_of(reply) == (400, "invalid_request_error")
    for version in ("2023-01-01", "2026", "later"):
        reply = await stage.http.post(PATH, json=BODY, headers={"anthropic-version": version})
        assert error_of(reply) == (400, "invalid_request_error"), version
        assert "anthropic-version must be 2023-06-01 or a later date" in reply.text
    assert not stage.scheduler.played


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
async def test_both_versions_of_the_api_are_answered_alike(stage: Stage, version: str) -> None:
    asked = {**BODY, "temperature": 0.5}
    plain = (await stage.http.post(PATH, json=asked)).json()
    reply = await stage.http.post(PATH, json=asked, headers={"anthropic-version": version})
    assert reply.status_code == 200, reply.text
    assert json.loads(reply.text.replace(reply.json()["id"][4:], plain["id"][4:])) == plain


def error_of(reply: httpx.Response) -> tuple[int, str]:
    content = reply.json()
    assert content["type"] == "error" and set(content["error"]) == {"type", "message"}
    return reply.status_code, content["error"]["type"]


async def test_errors_of_the_anthropic_client(stage: Stage, client: "AsyncAnthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="other"):
        await client.messages.create(**BODY | {"model": "other"})
    assert error_of(await stage.http.get(PATH)) == (405, "invalid_request_error")
    assert error_of(await stage.http.post(f"{PATH}/none")) == (404, "not_found_error")
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("The red").ids]
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    text = ""
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        async with client.messages.stream(**BODY) as stream:
            async for piece in stream.text_stream:
                text += piece
    assert text == "The red"
    with pytest.raises(anthropic.BadRequestError, match="it broke"):
        await client.messages.create(**BODY)


async def test_keys_are_asked_for(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> None:
    import anthropic

    async with open_stage(redis_url, model_folder, tokenizer, api_key="sesame") as stage:
        assert error_of(await stage.http.post(PATH, json=BODY)) == (401, "authentication_error")
        for keys in ({"api_key": "sesame"}, {"auth_token": "sesame"}):
            async with anthropic_client(stage, **keys) as client:
                assert (await client.messages.create(**BODY)).stop_reason == "end_turn"
                assert (
                    await client.messages.count_tokens(model=MODEL, messages=MESSAGES)
                ).input_tokens
                assert [model.id async for model in client.models.list()] == [MODEL]
                assert (await client.models.retrieve(MODEL)).id == MODEL
        async with anthropic_client(stage, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**BODY)
            with pytest.raises(anthropic.AuthenticationError):
                await client.models.list()


def merged(events: list[NamedEvent]) -> list[dict[str, Any]]:
    """What events say, neighbouring deltas of a block as one, without pings."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event.name == "ping":
            continue
        content = json.loads(json.dumps(event.content))
        last = found[-1] if found else {}
        if event.name == "content_block_delta" and (last.get("type"), last.get("index")) == (
            event.name,
            content["index"],
        ):
            for name in ("text", "thinking", "partial_json"):
                if name in content["delta"]:
                    last["delta"][name] += content["delta"][name]
        else:
            found.append(content)
    return found


CUT = [
    pytest.param(1, {"tools": TOOLS}, marks=pytest.mark.full),
    (5, {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    pytest.param(
        3, {"tools": TOOLS, "stop_sequences": ["days", "moment.!"]}, marks=pytest.mark.full
    ),
    pytest.param(
        2,
        {"tools": TOOLS, "max_tokens": 60, "thinking": {"type": "disabled"}},
        marks=pytest.mark.full,
    ),
    (1, {"stop_sequences": ["weather"]}),
]


@pytest.mark.parametrize(("size", "body"), CUT, ids=lambda value: str(value)[:40])
async def test_the_rest_after_every_event_at_another_gateway(
    stage: Stage, other: Gateway, size: int, body: dict[str, Any]
) -> None:
    stage.says(ANSWER, size=size)
    body = {**BODY, **body, "stream": True}
    key = {"Idempotency-Key": "one"}
    reply = await stage.http.post(PATH, json=body, headers=ASK_FOR_IDS | key)
    whole = named_events(reply.text)
    assert whole[0].name == "message_start" and whole[-1].name == "message_stop"
    assert len({event.event_id for event in whole}) == len(whole), "each event has an id of its own"
    rid = whole[0].event_id.partition("/")[0]
    async with plain_client(other.url, timeout=60) as client:
        for index, event in enumerate(whole):
            found = await client.get(f"/v1/requests/{rid}/stream", params={"after": event.event_id})
            assert merged(named_events(found.text)) == merged(whole[index + 1 :]), event
        again = await client.post(
            PATH, json=body, headers=key | {"Last-Event-ID": whole[3].event_id}
        )
        assert merged(named_events(again.text)) == merged(whole[4:])
        everything = await client.get(f"/v1/requests/msg_{rid}/stream")
        assert merged(named_events(everything.text)) == merged(whole)


@pytest.mark.parametrize("timings", [Timings(reread_s=0.02, silence_s=0.05)])
async def test_silence_is_bridged_by_pings(stage: Stage, client: "AsyncAnthropic") -> None:
    async def pause(rid: str, index: int) -> None:
        await asyncio.sleep(0.4 if index in (0, 4) else 0.0)

    stage.says("Hello, you.")
    stage.scheduler.step = pause
    reply = await stage.http.post(PATH, json=BODY | {"stream": True})
    assert reply.text.count('event: ping\ndata: {"type":"ping"}\n\n') > 2
    async with client.messages.stream(**BODY) as stream:
        assert await stream.get_final_text() == "Hello, you."


async def test_a_body_as_coding_agents_send_it(stage: Stage) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    body = {
        "model": MODEL,
        "max_tokens": 400,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are a coding agent."},
            {"type": "text", "text": "Be brief.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<hint>here</hint>"},
                    {"type": "text", "text": "List.", **cached},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "Bash",
                        "input": {"command": "ls"},
                    }
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "tool_use_id": "toolu_1",
                        "type": "tool_result",
                        "content": "a.py",
                        "is_error": False,
                        **cached,
                    }
                ],
            },
        ],
        "tools": [{"name": "Bash", "description": "Runs", "input_schema": schema, **cached}],
        "metadata": {"user_id": "user_" + "0" * 64},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14",
    }
    reply = await stage.http.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    events = named_events(reply.text)
    begun = [
        event.content["content_block"]["type"]
        for event in events
        if event.name == "content_block_start"
    ]
    assert begun == ["thinking", "text", "tool_use", "tool_use"]
    seen = stage.preprocess.seen[-1].conversation
    assert [m.role for m in seen.messages] == ["system", "user", "assistant", "tool"]
