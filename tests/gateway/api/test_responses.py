"""The Responses API: OpenAI's own client, its events, its errors, and streams that go on elsewhere."""

import base64
import json
from typing import Any

import openai
import pydantic
import pytest

from services.gateway.gateway import Gateway
from shared.errors import InvalidRequest
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.marked_model import ANSWER, FIRST, MARKED, SECOND, THOUGHT, WEATHER
from tests.support.gateway.stage import MODEL, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, NamedEvent, named_events
from tests.support.pictures import png

STAGED_MODEL = MARKED
PATH = "/v1/responses"
QUESTION = "What is the weather?"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "天气", "parameters": SCHEMA},
    {"type": "function", "name": "stop", "parameters": {"type": "object"}, "strict": False},
    {"type": "web_search"},
]


def check_output(output: Any, rid: str) -> None:
    thought, said, first, second = output
    assert (thought.type, thought.id) == ("reasoning", f"rs_{rid}_0")
    assert [part.text for part in thought.content] == [THOUGHT]
    assert (said.type, said.role, said.content[0].text) == ("message", "assistant", "One moment.")
    assert (first.type, first.name, first.arguments) == ("function_call", "weather", WEATHER)
    assert (second.name, second.arguments, second.call_id) == ("stop", "{}", f"call_{rid}_0_1")
    assert {one.status for one in output} == {"completed"}


async def test_a_response_of_the_openai_client(stage: Stage) -> None:
    ids = stage.says(ANSWER)
    asked: Any = {
        "model": MODEL, "input": QUESTION, "instructions": "Be brief.", "tools": TOOLS, "metadata": {"a": "b"},
        "temperature": 0.5, "max_output_tokens": 300, "reasoning": {"effort": "high"}, "text": {"verbosity": "low"},
    }  # fmt: skip
    whole = await stage.openai.responses.create(**asked)
    assert (whole.object, whole.status, whole.model, whole.error) == (
        "response",
        "completed",
        MODEL,
        None,
    )
    rid = whole.id.removeprefix("resp_")
    assert rid == [*stage.scheduler.played][-1]
    check_output(whole.output, rid)
    assert whole.output_text == "One moment."
    assert whole.usage is not None and whole.usage.output_tokens == len(ids)
    assert whole.usage.output_tokens_details.reasoning_tokens > 3
    assert whole.usage.total_tokens == whole.usage.input_tokens + len(ids)
    assert (whole.instructions, whole.metadata, whole.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (
        whole.max_output_tokens == 300 and whole.parallel_tool_calls and whole.tool_choice == "auto"
    )
    assert [tool.type for tool in whole.tools] == ["function", "function", "web_search"]
    seen = stage.preprocess.seen[-1].conversation
    assert [(m.role, m.content[0].text) for m in seen.messages] == [
        ("system", "Be brief."),
        ("user", QUESTION),
    ]
    assert [tool["function"]["name"] for tool in json.loads(seen.tools_json)] == ["weather", "stop"]
    assert json.loads(seen.chat_template_kwargs_json) == {
        "reasoning_effort": "high",
        "verbosity": "low",
    }

    stream = await stage.openai.responses.create(**asked, stream=True)
    events: list[Any] = [event async for event in stream]
    numbers = [event.sequence_number for event in events]
    assert numbers[:2] == [0, 1] and numbers == sorted(set(numbers))
    assert events[-1].type == "response.completed"
    check_output(events[-1].response.output, events[-1].response.id.removeprefix("resp_"))
    assert events[-1].response.usage == whole.usage

    del asked["text"]
    async with stage.openai.responses.stream(**asked) as managed:
        kinds = [event.type async for event in managed]
        final = await managed.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 10, "they come as they are made"
    check_output(final.output, final.id.removeprefix("resp_"))
    assert final.output_text == "One moment."


async def test_why_a_response_ended(stage: Stage) -> None:
    stage.says("One, two, END of it.")
    whole = await stage.openai.responses.create(model=MODEL, input=QUESTION)
    assert (whole.status, whole.output_text) == ("completed", "One, two, END of it.")
    cut = await stage.openai.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.output[-1].to_dict()["status"] == "incomplete"
    assert (
        cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
    )
    stream = await stage.openai.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=2, stream=True
    )
    last: Any = [event async for event in stream][-1]
    assert (last.type, last.response.output[0].content[0].text) == (
        "response.incomplete",
        cut.output_text,
    )
    stopped = await stage.openai.responses.create(
        model=MODEL, input=QUESTION, extra_body={"stop": "END"}
    )
    assert (stopped.status, stopped.output_text) == ("completed", "One, two, ")


async def test_items_become_what_chat_templates_know(stage: Stage) -> None:
    picture = png(3)
    image = {
        "type": "input_image",
        "image_url": f"data:image/png;base64,{base64.b64encode(picture).decode()}",
        "detail": "high",
    }
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "weather",
        "arguments": '{"city": "x"}',
    }
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "See"}, image]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
        },
        call,
        {**call, "call_id": "c2", "arguments": "{no"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [image]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "aha"}]},
        {"role": "assistant", "content": "Sun."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    await stage.openai.responses.create(model=MODEL, input=items, tools=TOOLS)
    seen = stage.preprocess.seen[-1].conversation.messages
    assert [m.role for m in seen] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "assistant", "user",
    ]  # fmt: skip
    assert (seen[1].content[0].text, seen[1].content[1].media.data) == ("See", picture)
    assert (seen[2].reasoning, seen[2].content[0].text) == ("hm", "Well.")
    calls = json.loads(seen[2].tool_calls_json)
    assert [(one["id"], one["function"]["arguments"]) for one in calls] == [
        ("c1", {"city": "x"}),
        ("c2", "{no"),
    ]
    assert (seen[3].tool_call_id, seen[3].content[0].text) == ("c1", "sunny")
    assert (seen[4].tool_call_id, seen[4].content[0].media.data) == ("c2", picture)
    assert (seen[5].reasoning, seen[5].content[0].text, seen[6].content[0].text) == (
        "aha",
        "Sun.",
        "Really.",
    )


class Place(pydantic.BaseModel):
    """What a test asks for."""

    city: str


async def test_forms_and_calls_that_have_to_be_made(stage: Stage) -> None:
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts

    async def grammar_of(**more: Any) -> str:
        await stage.openai.responses.create(model=MODEL, input=QUESTION, **more)
        return str([*stage.scheduler.played.values()][-1].spec.sampling.grammar)

    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    of_schema = await grammar_of(text=form)
    assert accepts(of_schema, '{"city": "x"}') and not accepts(of_schema, "{}")
    assert accepts(await grammar_of(text={"format": {"type": "json_object"}}), '{"a": []}')
    stop = SECOND.replace('"}', '", "arguments": {}}')
    weather = FIRST.replace(WEATHER, '{"city": "x"}')
    required = await grammar_of(tools=TOOLS, tool_choice="required")
    assert accepts(required, f"{weather}\n{stop}") and not accepts(required, "Hi.")
    for choice in (
        {"type": "function", "name": "stop"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "stop"}],
        },
    ):
        named = await grammar_of(tools=TOOLS, tool_choice=choice)
        assert accepts(named, stop) and not accepts(named, weather)
    shown = json.loads(stage.preprocess.seen[-1].conversation.tools_json)
    assert [tool["function"]["name"] for tool in shown] == ["stop"]
    assert not await grammar_of(tools=TOOLS)
    stage.says('{"city": "Łódź"}')
    parsed = await stage.openai.responses.parse(model=MODEL, input=QUESTION, text_format=Place)
    assert parsed.output_parsed == Place(city="Łódź")


def _item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


# Bodies, and the field that the error names.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"wings": 2}, "wings"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    (_item(role="bird", content="x"), "input[0].role"),
    (_item(role="user"), "input[0].content"),
    (_item(role="user", content="x", wings=2), "input[0].wings"),
    (_item(role="user", content=[{"type": "input_file"}]), "input[0].content[0].file_data"),
    (_item(role="user", content=[{"type": "text", "text": "x"}]), "input[0].content[0].type"),
    (_item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text"),
    (_item(role="user", content=[{"type": "input_image"}]), "input[0].content[0].image_url"),
    (_item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0].image_url"),
    (_item(type="item_reference", id="x"), "input[0].id"),
    (_item(type="function_call", name="x"), "input[0].call_id"),
    (_item(type="function_call", call_id="x"), "input[0].name"),
    (_item(type="function_call_output", output="x"), "input[0].call_id"),
    (_item(type="function_call_output", call_id="x"), "input[0].output"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"max_output_tokens": 511}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["message.output_text"]}, "include"),
    ({"truncation": "never"}, "truncation"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "x", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "x", "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": "required", "tools": TOOLS[2:]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice.name"),
    ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"verbosity": "chatty"}}, "text.verbosity"),
    ({"background": True, "store": False}, "store"),
]  # fmt: skip


async def test_what_is_not_offered_is_refused_by_its_name(stage: Stage) -> None:
    for change, field in REFUSED:
        reply = await stage.http.post(PATH, json={"input": QUESTION, **change})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field), error
        assert error["message"].startswith(field) or "max_output_tokens" in field
    for body in (b"", b"[]", b"{", b"\xff", b'{"input": "\\ud800"}', b"[" * 9999):
        reply = await stage.http.post(
            PATH, content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 400 and reply.json()["error"]["code"]
    assert not stage.scheduler.played


async def test_errors_of_the_openai_client(stage: Stage) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        await stage.openai.responses.create(model="other", input=QUESTION)
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("The red").ids]
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    stream = await stage.openai.responses.create(model=MODEL, input=QUESTION, stream=True)
    events: list[Any] = [event async for event in stream]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == "The red"
    )
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.message == "it broke"
    with pytest.raises(openai.BadRequestError, match="it broke"):
        await stage.openai.responses.create(model=MODEL, input=QUESTION)


def merged(events: list[NamedEvent]) -> list[dict[str, Any]]:
    """What events say, neighbouring deltas of an item as one, which has the number of the last."""
    found: list[dict[str, Any]] = []
    for event in events:
        content, last = dict(event.content), found[-1] if found else {}
        if event.name.endswith(".delta") and last.get("type") == event.name:
            content["delta"] = last["delta"] + content["delta"]
            if "logprobs" in content:
                content["logprobs"] = last["logprobs"] + content["logprobs"]
            found[-1] = content
        else:
            found.append(content)
    return found


CUT = [
    pytest.param(1, {"tools": TOOLS}, marks=pytest.mark.full),
    pytest.param(5, {"tools": TOOLS, "parallel_tool_calls": False}, marks=pytest.mark.full),
    (3, {"tools": TOOLS, "stop": ["days", "moment.!"], "max_output_tokens": 60}),
    (2, {"stop": "weather"}),
    (2, {"tools": TOOLS, "top_logprobs": 1}),
]


@pytest.mark.parametrize(("size", "body"), CUT, ids=lambda value: str(value)[:40])
async def test_the_rest_after_every_event_at_another_gateway(
    stage: Stage, other: Gateway, size: int, body: dict[str, Any]
) -> None:
    stage.says(ANSWER, size=size)
    body = {"input": QUESTION, **body, "stream": True}
    reply = await stage.http.post(PATH, json=body, headers=ASK_FOR_IDS)
    whole = named_events(reply.text)
    assert whole[0].name == "response.created"
    assert whole[-1].name in ("response.completed", "response.incomplete")
    assert len({event.event_id for event in whole}) == len(whole), "each event has an id of its own"
    rid = whole[0].event_id.partition("/")[0]
    async with plain_client(other.url, timeout=60) as client:
        for index, event in enumerate(whole):
            found = await client.get(f"/v1/requests/{rid}/stream", params={"after": event.event_id})
            assert merged(named_events(found.text)) == merged(whole[index + 1 :]), event
        everything = await client.get(f"/v1/requests/resp_{rid}/stream")
        assert merged(named_events(everything.text)) == merged(whole)


async def test_a_body_as_coding_agents_send_it(stage: Stage) -> None:
    body = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Sandboxed."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "List the files."}],
            },
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command":["ls"]}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs",
                "strict": False,
                "parameters": {"type": "object"},
            },
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edits",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.*/"},
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0199"},
    }
    reply = await stage.http.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    last = named_events(reply.text)[-1]
    assert last.name == "response.completed"
    assert [item["type"] for item in last.content["response"]["output"]] == [
        "reasoning", "message", "function_call",
    ]  # fmt: skip
    seen = stage.preprocess.seen[-1].conversation
    assert [tool["function"]["name"] for tool in json.loads(seen.tools_json)] == [
        "shell",
        "apply_patch",
    ]
    assert [m.role for m in seen.messages] == ["system", "system", "user", "assistant", "tool"]
