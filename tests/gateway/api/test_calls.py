"""Calls of tools and reasoning, streamed, whole and resumed: what clients get of what a model writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.gateway import Gateway
from services.gateway.model.output_forms import OutputForms
from shared.errors import Unavailable
from shared.net.channels import open_channel
from tessera.common.v1.ending_pb2 import Failure
from tessera.gateway.v1.chat_pb2 import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    GenerationOptions,
    GetRequestRequest,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tessera.scheduler.v1.queue_pb2 import MessageFormat
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.marked_model import ANSWER, FIRST, MARKED, SECOND, THOUGHT, WEATHER
from tests.support.gateway.stage import MODEL, Stage, open_stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, events, merged, with_ids
from tests.support.tokenizers import byte_level_tokenizer, token_id

STAGED_MODEL = MARKED
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
SECOND_CALL = SECOND.replace('"}', '", "arguments": {}}')
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "stop"}},
]


def expected_calls(request_id: str, choice: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{request_id}_{choice}_{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate([("weather", WEATHER), ("stop", "{}")])
    ]


async def test_the_openai_client_gets_calls_whole_and_streamed(stage: Stage) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    reply = await stage.openai.chat.completions.create(**asked)
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    said: Any = choice.message
    assert said.reasoning_content == said.reasoning == THOUGHT
    rid = reply.id.removeprefix("chatcmpl-")
    calls = [call.model_dump(exclude_unset=True) for call in said.tool_calls]
    assert calls == expected_calls(rid)
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    thought = reply.usage.completion_tokens_details.reasoning_tokens or 0
    ids = stage.tokenizer.encode(f"<think>\n{THOUGHT}\n</think>").ids
    assert thought == len(ids)

    async with stage.openai.chat.completions.stream(
        **asked, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type async for event in stream]
        final: Any = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 10, (
        "arguments come as they are made"
    )
    assert kinds.count("tool_calls.function.arguments.done") == 2
    message = final.choices[0].message
    assert (message.content, message.reasoning) == ("One moment.", THOUGHT)
    assert [c.function.arguments for c in message.tool_calls] == [WEATHER, "{}"]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens_details.reasoning_tokens == thought


BODIES: list[dict[str, Any]] = [
    {"tools": TOOLS, "stream_options": {"include_usage": True}},
    {
        "tools": TOOLS,
        "n": 2,
        "logprobs": True,
        "return_token_ids": True,
        "stop": ["days", "moment.!", "_call>"],
        "include_stop_str_in_output": False,
    },
    {"tools": TOOLS, "stop": ["</tool_call>\n"], "include_reasoning": False},
    {"tools": TOOLS, "max_tokens": 60, "parallel_tool_calls": False},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_the_rest_after_an_event_at_another_gateway(
    stage: Stage, other: Gateway, body: dict[str, Any], every: int
) -> None:
    eos = token_id(stage.tokenizer, "<|im_end|>")

    def answer(spec: Any, choice: int) -> list[list[int]]:
        ids = [*stage.tokenizer.encode(ANSWER[8 * choice :]).ids, eos]
        size = 1 + choice
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    stage.scheduler.answer_choice = answer
    body = {"messages": MESSAGES, **body, "stream": True}
    whole = await stage.http.post("/v1/chat/completions", json=body, headers=ASK_FOR_IDS)
    pairs = with_ids(whole.text)
    rid = pairs[0][0].partition("/")[0]
    async with plain_client(other.url, timeout=60) as client:
        for index, (name, _) in list(enumerate(pairs))[::-every]:
            found = await client.get(f"/v1/requests/{rid}/stream", params={"after": name})
            rest = [chunk for later, chunk in pairs[index + 1 :] if later != name]
            rest += [chunk for _, chunk in pairs if not chunk["choices"] and chunk not in rest]
            assert _merged(events(found.text)) == _merged(rest), name


def _merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks as one, the parts of each call too."""
    found = merged(chunks)
    for choice in found["choices"].values():
        calls: dict[int, dict[str, Any]] = {}
        for part in choice.get("delta", {}).pop("tool_calls", ()):
            call = calls.setdefault(part["index"], {"arguments": ""})
            arguments = call["arguments"] + part["function"]["arguments"]
            call |= {"id": part.get("id", call.get("id")), **part["function"]}
            call["arguments"] = arguments
        choice["calls"] = calls
    return found


async def reply_of(stage: Stage, said: str, **body: Any) -> dict[str, Any]:
    stage.says(said)
    reply = await stage.chat(messages=MESSAGES, **body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


async def test_what_is_no_call_stays_text(stage: Stage) -> None:
    spelled = "Write <tool_call\u200b> so."
    for said, content in (
        (spelled, spelled),
        ("<tool_call>\nno JSON</tool_call> ok", "\nno JSON</tool_call> ok"),
        ('So: <tool_call>{"nam', 'So: {"nam'),
    ):
        choice = await reply_of(stage, said, tools=TOOLS)
        assert choice["message"]["content"] == content
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    begun = await reply_of(stage, '<tool_call>{"name": "weather", "arguments": {"ci', tools=TOOLS)
    assert begun["finish_reason"] == "stop", "no call is whole"
    assert begun["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"ci',
    }


async def test_text_that_spells_a_marker_token_is_never_a_call(stage: Stage) -> None:
    plain = byte_level_tokenizer()  # without the markers: their letters alone
    ids = [*plain.encode(FIRST).ids, token_id(stage.tokenizer, "<|im_end|>")]
    stage.scheduler.answer = lambda spec: [[number] for number in ids]
    message = (await stage.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] == FIRST and "tool_calls" not in message


async def test_one_call_at_most_and_none_where_none_are_wanted(stage: Stage) -> None:
    one = await reply_of(stage, ANSWER, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["weather"]
    assert one["finish_reason"] == "tool_calls"
    none = await reply_of(stage, ANSWER, tools=TOOLS, tool_choice="none")
    assert FIRST.removeprefix("<tool_call>") in none["message"]["content"]
    assert none["message"]["reasoning"] == THOUGHT and none["finish_reason"] == "stop"
    hidden = await reply_of(stage, ANSWER, tools=TOOLS, include_reasoning=False)
    assert "reasoning" not in hidden["message"] and hidden["message"]["content"] == "One moment."
    cut = await reply_of(stage, ANSWER, tools=TOOLS, max_tokens=40)
    assert cut["finish_reason"] == "length"


async def test_reasoning_that_the_prompt_has_opened(stage: Stage) -> None:
    opened = [{"role": "user", "content": "<think>\n"}]
    stage.says(f"{THOUGHT}\n</think>\n\nHi.")
    message = (await stage.chat(messages=opened)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT, "Hi.")
    stage.says("Hi.")
    assert (await stage.chat()).json()["choices"][0]["message"]["content"] == "Hi."


async def test_without_a_form_text_stays_as_it_is(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"tool_call_parser": "none", "reasoning_parser": "none"}
    async with open_stage(redis_url, model_folder, tokenizer, **changes) as stage:
        stage.says(ANSWER)
        text = (await stage.chat()).json()["choices"][0]["message"]["content"]
        assert text == ANSWER.replace("<tool_call>", "")
        refused = await stage.chat(tools=TOOLS)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "no_tool_format")
        assert "--tool-call-parser" in error["message"]


async def test_grpc_has_the_same(stage: Stage) -> None:
    turn = ChatMessage(role="user", content=[ContentPart(text="hi")])
    request = ChatRequest(
        messages=[turn],
        tools_json=json.dumps(TOOLS),
        options=GenerationOptions(max_tokens=300),
    )
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub: Any = ChatServiceStub(channel)
        found = [event async for event in stub.Chat(request)]
    deltas = [event.delta for event in found if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == "One moment."
    assert "".join(delta.reasoning for delta in deltas) == THOUGHT
    parts = [part for delta in deltas for part in delta.tool_calls]
    rid = found[0].accepted.request_id
    for index, call in enumerate(expected_calls(rid)):
        mine = [part for part in parts if part.index == index]
        assert (mine[0].id, mine[0].name) == (call["id"], call["function"]["name"])
        assert "".join(part.arguments for part in mine) == call["function"]["arguments"]
    assert found[-2].finished.calls_tools
    assert found[-1].usage.reasoning_tokens > 5


async def test_earlier_calls_reach_the_template(stage: Stage) -> None:
    def call(name: str, arguments: Any) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "x", "arguments": arguments}}

    half = '{"b": "\\ud800"}'  # no text can hold what it says
    calls = [call("a", '{"b": 1}'), call("c", "{no"), call("d", {"e": []}), call("f", "")]
    calls.append(call("g", half))
    turns = [
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
    ]
    documents = [{"title": "T", "text": "x"}]
    body = {"messages": [*MESSAGES, *turns], "documents": documents, "reasoning_effort": "none"}
    reply = await stage.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    seen = stage.preprocess.seen[-1].conversation
    given = json.loads(seen.messages[1].tool_calls_json)
    assert [one["function"]["arguments"] for one in given] == [{"b": 1}, "{no", {"e": []}, {}, half]
    assert [one["id"] for one in given] == ["a", "c", "d", "f", "g"]
    assert seen.messages[1].reasoning == "hm"
    assert (seen.messages[2].role, seen.messages[2].tool_call_id) == ("tool", "a")
    assert json.loads(seen.documents_json) == documents
    told = {"reasoning_effort": "none", "enable_thinking": False}
    assert json.loads(seen.chat_template_kwargs_json) == told
    for change, field in (
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "y"}}},
            "tool_choice.function.name",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"documents": ["x"]}, "documents[0]"),
    ):
        refused = await stage.chat(**{"tools": TOOLS, **change})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def grammar_of(stage: Stage, **body: Any) -> str:
    specs: list[Any] = []
    ids = [*stage.tokenizer.encode("x").ids, token_id(stage.tokenizer, "<|im_end|>")]

    def answer(spec: Any) -> list[list[int]]:
        specs.append(spec)
        return [ids]

    stage.scheduler.answer = answer
    reply = await stage.chat(**body)
    assert reply.status_code == 200, reply.text
    return str(specs[-1].sampling.grammar)


async def test_a_call_that_has_to_be_made_is_the_form_of_the_answer(stage: Stage) -> None:
    match = Acceptor(stage.tokenizer, "<|im_end|>")
    first, second = FIRST.replace(WEATHER, '{"city": 1}'), SECOND_CALL
    both = f"{first}\n{second}"
    thought = f"<think>\n{THOUGHT}\n</think>\n\n"
    required = await grammar_of(stage, tools=TOOLS, tool_choice="required")
    single = await grammar_of(stage, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    form = {"type": "json_object"}  # of a text, which such an answer does not have
    beside = await grammar_of(stage, tools=TOOLS, tool_choice="required", response_format=form)
    assert beside == required
    named = await grammar_of(
        stage, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "stop"}}
    )
    for text, accepting in (
        (first, (True, True, False)),
        (second, (True, True, True)),
        (thought + second, (True, True, True)),
        (both, (True, False, False)),
        ("Hi.", (False, False, False)),
        (thought, (False, False, False)),
    ):
        found = tuple(match.accepts(one, text) for one in (required, single, named))
        assert found == accepting, text
    opened = [{"role": "user", "content": "<think>\n"}]
    begun = await grammar_of(stage, tools=TOOLS, tool_choice="required", messages=opened)
    assert match.accepts(begun, thought.removeprefix("<think>\n") + both)
    assert not match.accepts(begun, both)
    assert not await grammar_of(stage, tools=TOOLS)


async def test_a_text_that_is_held_to_json_may_be_calls_instead(stage: Stage) -> None:
    match = Acceptor(stage.tokenizer, "<|im_end|>")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    either = await grammar_of(stage, tools=TOOLS, response_format=form)
    none = await grammar_of(stage, tools=TOOLS, response_format=form, tool_choice="none")
    for text, accepting in (
        ('{"a": 1}', (True, True)),
        (SECOND_CALL, (True, False)),
        ('{"b": 1}', (False, False)),
        ("Hi.", (False, False)),
    ):
        assert tuple(match.accepts(one, text) for one in (either, none)) == accepting, text
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    refused = await stage.chat(tools=TOOLS, response_format=wrong)
    assert refused.json()["error"]["param"].startswith("response_format.json_schema.schema")


async def test_a_form_of_the_client_is_content_where_the_prompt_opens_reasoning(
    stage: Stage,
) -> None:
    stage.says('{"a": 1}')
    opened = [{"role": "user", "content": "<think>\n"}]
    asked: Any = {"messages": opened, "response_format": {"type": "json_object"}}
    message = (await stage.chat(**asked)).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and "reasoning" not in message


def test_a_form_of_a_later_version_is_left_to_another_gateway() -> None:
    for form in (MessageFormat(calls="later"), MessageFormat(reasoning="later")):
        with pytest.raises(Unavailable, match="resume at another gateway"):
            OutputForms({}).of(form)


async def test_a_bound_of_reasoning_is_the_form_of_the_answer(stage: Stage) -> None:
    match = Acceptor(stage.tokenizer, "<|im_end|>")
    thought = "The user wants it."
    most = len(stage.tokenizer.encode(thought).ids)
    opened = [{"role": "user", "content": "<think>"}]
    for tools, behind in (
        ({}, f"Hi. {FIRST}"),
        ({"tool_choice": "required"}, f"\n\n{SECOND_CALL}"),
    ):
        asked = {"tools": TOOLS, **tools}
        for bound in (most, most - 1):
            may = await grammar_of(stage, thinking_token_budget=bound, **asked)
            must = await grammar_of(stage, thinking_token_budget=bound, messages=opened, **asked)
            answer = f"{thought}</think>{behind}"
            assert match.accepts(may, f"<think>{answer}") == (bound == most)
            assert match.accepts(must, answer) == (bound == most)


async def test_a_bound_of_reasoning_that_cannot_be_held_to_is_refused(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, stage: Stage
) -> None:
    field = "thinking_token_budget"
    for change, named in (
        ({field: -1}, field),
        ({field: 513}, field),
        ({field: 5, "response_format": {"type": "json_object"}}, field),
        ({field: 5, "ignore_eos": True}, "ignore_eos"),
        ({field: 5, "use_beam_search": True}, "use_beam_search"),
    ):
        error = await stage.chat(**change)
        assert (error.status_code, error.json()["error"]["param"]) == (400, named), error.text
    completion = await stage.http.post("/v1/completions", json={"prompt": "x", field: 5})
    assert completion.json()["error"]["param"] == field
    async with open_stage(redis_url, model_folder, tokenizer, reasoning_parser="none") as other:
        error = await other.chat(thinking_token_budget=5)
        assert error.json()["error"]["code"] == "unsupported_parameter"
        assert "--reasoning-parser" in error.json()["error"]["message"]


async def test_what_a_decoder_finds_in_a_form_names_what_asked_for_it(stage: Stage) -> None:
    text = "it cannot be followed any further"
    stage.scheduler.answer = lambda spec: [[5]]
    stage.scheduler.failure = Failure(
        code=3,
        reason="GRAMMAR_TOO_COMPLEX",
        message=f"grammar: {text}",
        metadata={"field": "grammar"},
    )
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ]
    for body, field in bodies:
        reply = await stage.chat(**body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field), error
        assert error["message"] == f"{field}: {text}"
        rid = reply.headers["x-tessera-request-id"]
        state = (await stage.http.get(f"/v1/requests/{rid}")).json()
        assert state["choices"][0]["error"] == error
        async with open_channel(stage.gateway.grpc_address) as channel:
            status = await ChatServiceStub(channel).GetRequest(GetRequestRequest(request_id=rid))
        assert status.choices[0].failure.metadata["field"] == field


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_the_model_is_told_of_tools_that_are_allowed_alone(stage: Stage, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "stop"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    await stage.openai.chat.completions.create(**asked)
    told = json.loads(stage.preprocess.seen[-1].conversation.tools_json)
    assert [tool["function"]["name"] for tool in told] == ["stop"]
    [played] = stage.scheduler.played.values()
    assert bool(played.spec.sampling.grammar) == (mode == "required")


@pytest.mark.parametrize(
    ("allowed", "field"),
    [
        (None, "mode"),
        ({"mode": "none", "tools": TOOLS}, "mode"),
        ({"mode": "auto", "tools": []}, "tools"),
        (
            {"mode": "auto", "tools": [{"type": "function", "name": "stop"}]},
            "tools[0].function.name",
        ),
    ],
)
async def test_allowed_tools_that_are_none(stage: Stage, allowed: Any, field: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    reply = await stage.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"tool_choice.allowed_tools.{field}"
