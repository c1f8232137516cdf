"""OpenAI's custom tools: what its client gets of them in chats and responses, whole, streamed and resumed."""

import json
from typing import Any

import openai
import pytest

from services.gateway.gateway import Gateway
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.marked_model import MARKED
from tests.support.gateway.stage import MODEL, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, named_events, with_ids

STAGED_MODEL = MARKED
MESSAGES: Any = [{"role": "user", "content": "Run it."}]
PATCH = '+ "a"\\n\n-\t天气 😀\n'
LARK = 'start: line+\nline: ("+" | "-") /[^\\n]*/ "\\n"\n'
CUSTOM: dict[str, Any] = {
    "shell": {"name": "shell", "description": "Runs a command"},
    "patch": {
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
    },
    "code": {
        "name": "code",
        "format": {"type": "grammar", "syntax": "regex", "definition": '^[a-z]+ = "[^"]*"$'},
    },
}


def in_chat(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool in the form of chats."""
    nested, form = dict(tool), tool.get("format")
    if form is not None:
        grammar = {name: form[name] for name in ("syntax", "definition")}
        nested["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": nested}


FUNCTION: Any = {"name": "stop", "parameters": {"type": "object"}}
CHAT_TOOLS: list[Any] = [
    *map(in_chat, CUSTOM.values()),
    {"type": "function", "function": FUNCTION},
]
TOOLS: list[Any] = [
    *({"type": "custom", **tool} for tool in CUSTOM.values()),
    {"type": "function", **FUNCTION},
    {"type": "web_search"},
]


def call(name: str, arguments: Any) -> str:
    """As the model writes it."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


CALLS = [call("patch", {"input": PATCH}), call("stop", {}), call("shell", {"input": "ls"})]
ANSWER = "\n".join(["<think>\nhm\n</think>\n\nSo.", *CALLS])


def told(stage: Stage) -> list[Any]:
    """The tools of the last prompt."""
    found: list[Any] = json.loads(stage.preprocess.seen[-1].conversation.tools_json)
    return [tool["function"] for tool in found]


async def test_a_chat_of_the_openai_client(stage: Stage) -> None:
    stage.says(ANSWER)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": CHAT_TOOLS}
    reply = await stage.openai.chat.completions.create(**asked)
    choice, rid = reply.choices[0], reply.id.removeprefix("chatcmpl-")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
    calls: Any = choice.message.tool_calls
    assert [one.model_dump(exclude_unset=True) for one in calls] == [
        {"id": f"call_{rid}_0_0", "type": "custom", "custom": {"name": "patch", "input": PATCH}},
        {"id": f"call_{rid}_0_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
        {"id": f"call_{rid}_0_2", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
    ]  # fmt: skip
    shell, patch, code, stop = told(stage)
    assert shell == {
        "name": "shell",
        "description": "Runs a command",
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        },
    }
    assert LARK in patch["description"] and stop == FUNCTION
    assert code["description"].endswith(CUSTOM["code"]["format"]["definition"])

    stream = await stage.openai.chat.completions.create(**asked, stream=True)
    found: dict[int, dict[str, Any]] = {}
    pieces = 0
    async for chunk in stream:
        for one in chunk.choices[0].delta.tool_calls or []:
            given = one.model_dump(exclude_unset=True)
            if given["index"] not in found:
                found[given["index"]] = given
                continue
            kind = found[given["index"]]["type"]
            field = "input" if kind == "custom" else "arguments"
            assert given.keys() == {"index", kind} and given[kind].keys() == {field}
            found[given["index"]][kind][field] += given[kind][field]
            pieces += given["index"] == 0
    assert pieces > 5, "inputs come as they are made"
    assert [one["custom"] for index, one in found.items() if index != 1] == [
        {"name": "patch", "input": PATCH},
        {"name": "shell", "input": "ls"},
    ]

    turns = [
        *MESSAGES,
        choice.message.model_dump(exclude_unset=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "done"},
    ]
    await stage.openai.chat.completions.create(**{**asked, "messages": turns})
    seen = stage.preprocess.seen[-1].conversation.messages
    earlier = [one["function"] for one in json.loads(seen[1].tool_calls_json)]
    assert earlier[0] == {"name": "patch", "arguments": {"input": PATCH}}
    assert (seen[2].role, seen[2].tool_call_id) == ("tool", calls[0].id)


async def test_a_response_of_the_openai_client(stage: Stage) -> None:
    stage.says(ANSWER)
    asked: Any = {"model": MODEL, "input": "Run it.", "tools": TOOLS}
    whole = await stage.openai.responses.create(**asked)
    rid = whole.id.removeprefix("resp_")
    patch: Any
    thought, said, patch, stop, shell = whole.output
    assert (thought.type, said.type, stop.type) == ("reasoning", "message", "function_call")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", PATCH)
    assert (patch.id, patch.call_id) == (f"ctc_{rid}_2", f"call_{rid}_0_0")
    assert (shell.type, shell.to_dict()["input"]) == ("custom_tool_call", "ls")
    assert [tool.type for tool in whole.tools] == ["custom"] * 3 + ["function", "web_search"]
    assert [tool["name"] for tool in told(stage)] == ["shell", "patch", "code", "stop"]

    events: list[Any] = []
    async with stage.openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(e.delta for e in deltas if e.output_index == 2) == PATCH and len(deltas) > 5
    [done, _] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert (done.input, done.item_id) == (PATCH, deltas[0].item_id)
    assert [one.type for one in final.output] == [one.type for one in whole.output]

    result = {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"}
    items = [{"role": "user", "content": "Run it."}, *(o.to_dict() for o in whole.output), result]
    for body in ({"input": items}, {"input": [result], "previous_response_id": whole.id}):
        await stage.openai.responses.create(**{**asked, **body})
        seen = stage.preprocess.seen[-1].conversation.messages
        earlier = [one["function"] for one in json.loads(seen[1].tool_calls_json)]
        assert earlier[0] == {"name": "patch", "arguments": {"input": PATCH}}
        assert (seen[2].role, seen[2].content[0].text) == ("tool", "done")


async def test_the_rest_after_an_event_at_another_gateway(stage: Stage, other: Gateway) -> None:
    stage.says(ANSWER, size=2)
    body = {"messages": MESSAGES, "tools": CHAT_TOOLS, "stream": True}
    whole = await stage.http.post("/v1/chat/completions", json=body, headers=ASK_FOR_IDS)
    pairs = with_ids(whole.text)
    answer = {"input": "Run it.", "tools": TOOLS, "stream": True}
    response = await stage.http.post("/v1/responses", json=answer, headers=ASK_FOR_IDS)
    events = named_events(response.text)
    async with plain_client(other.url, timeout=60) as client:
        for index, (name, _) in list(enumerate(pairs))[::3]:
            rid = name.partition("/")[0]
            found = await client.get(f"/v1/requests/{rid}/stream", params={"after": name})
            rest = [chunk for _, chunk in pairs[index + 1 :]]
            assert _inputs(chunk for _, chunk in with_ids(found.text)) == _inputs(rest), name
        for index, event in list(enumerate(events))[::3]:
            rid = event.event_id.partition("/")[0]
            found = await client.get(f"/v1/requests/{rid}/stream", params={"after": event.event_id})
            said = [_said(one) for one in events[index + 1 :]]
            assert _joined(map(_said, named_events(found.text))) == _joined(said), event


def _inputs(chunks: Any) -> str:
    """All that chunks say of calls, in order."""
    found = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            for one in choice["delta"].get("tool_calls", []):
                kind = "custom" if "custom" in one else "function"
                found += one.get("id", "") + one[kind].get("name", "")
                found += one[kind].get("input", one[kind].get("arguments", ""))
    return found


def _said(event: Any) -> tuple[str, Any]:
    content = event.content
    return event.name, content.get("delta", {k: v for k, v in content.items() if k != "delta"})


def _joined(said: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in said:
        if found and name.endswith(".delta") and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + value)
        else:
            found.append((name, value))
    return found


async def grammar_of(stage: Stage, **body: Any) -> str:
    ids = stage.tokenizer.encode("x").ids
    specs: list[Any] = []

    def answer(spec: Any) -> list[list[int]]:
        specs.append(spec)
        return [ids]

    stage.scheduler.answer = answer
    reply = await stage.chat(**body)
    assert reply.status_code == 200, reply.text
    return str(specs[-1].sampling.grammar)


async def test_inputs_are_held_to_their_grammars(stage: Stage) -> None:
    match = Acceptor(stage.tokenizer, "<|im_end|>")
    right = call("patch", {"input": PATCH})
    wrong = call("patch", {"input": "a\n"})
    code, shell = call("code", {"input": 'a = "<b>"'}), call("shell", {"input": 'a "b"'})
    stop = call("stop", {"any": [1, {"x": "y"}]})
    thought = "<think>\nhm <b>\n</think>\n\n"
    one = {"type": "custom", "custom": {"name": "patch"}}
    listed = {
        "mode": "required",
        "tools": [one, {"type": "function", "function": {"name": "stop"}}],
    }
    allowed = {"type": "allowed_tools", "allowed_tools": listed}
    grammars = [
        await grammar_of(stage, tools=CHAT_TOOLS),
        await grammar_of(stage, tools=CHAT_TOOLS, tool_choice="required"),
        await grammar_of(stage, tools=CHAT_TOOLS, tool_choice=one),
        await grammar_of(stage, tools=CHAT_TOOLS, tool_choice=allowed),
    ]
    assert [tool["name"] for tool in told(stage)] == ["patch", "stop"]
    for text, accepting in (
        ("Hi.", (True, False, False, False)),
        (f"{thought}Hi.", (True, False, False, False)),
        (right, (True, True, True, True)),
        (thought + right, (True, True, True, True)),
        (f"{thought}See:\n{right}\n{code} Bye", (True, False, False, False)),
        (f"{right}\n{code}\n{shell}", (True, True, False, False)),
        (wrong, (False, False, False, False)),
        (f"See: {wrong}", (False, False, False, False)),
        (stop.replace('{"any": [1, {"x": "y"}]}', "{}"), (True, True, False, True)),
        (stop, (True, True, False, True)),
        (f"{stop}\n{wrong}", (False, False, False, False)),
    ):
        assert tuple(match.accepts(one, text) for one in grammars) == accepting, text
    form = {"type": "json_object"}
    either = await grammar_of(stage, tools=CHAT_TOOLS, response_format=form)
    for text, accepted in ((right, True), ("{}", True), (wrong, False), ("Hi.", False)):
        assert match.accepts(either, text) == accepted, text
    most = len(stage.tokenizer.encode("\nhm <b>\n").ids)
    for bound in (most, most - 1):
        bounded = await grammar_of(stage, tools=CHAT_TOOLS, thinking_token_budget=bound)
        assert match.accepts(bounded, f"{thought}Hi. {right}") == (bound == most)
    opened = [{"role": "user", "content": "<think>"}]
    begun = await grammar_of(stage, tools=CHAT_TOOLS, messages=opened)
    assert match.accepts(begun, f"hm</think>{right}") and not match.accepts(begun, right)
    assert not await grammar_of(stage, tools=[CHAT_TOOLS[0], CHAT_TOOLS[3]])


def _grammar(syntax: Any, definition: Any) -> Any:
    tool = {"name": "x", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    return tool


RECURSIVE = 'start: "(" start* ")" | /"[^"]*/ | "\\n\\n"\n'
REFUSED: list[tuple[Any, str, str]] = [
    ({}, "name", "at least one character"),
    ({"name": "x", "format": "text"}, "format", "an object"),
    ({"name": "x", "format": {"type": "json"}}, "format.type", "text"),
    ({"name": "x", "parameters": {"a": 1}}, "parameters", "leave it out"),
    ({"name": "x", "description": 1}, "description", "a string"),
    ({"name": "stop"}, "", "has the name of another tool"),
    (_grammar("gbnf", "x"), "GRAMMAR.syntax", "lark"),
    (_grammar("lark", ""), "GRAMMAR.definition", "at least one character"),
    (_grammar("lark", 'start: "a" missing'), "GRAMMAR.definition", "missing"),
    (_grammar("lark", "start: /(?=a)b/"), "GRAMMAR.definition", "look-around"),
    (_grammar("lark", "start: %json {}"), "GRAMMAR.definition", "%json"),
    (_grammar("lark", RECURSIVE), "GRAMMAR.definition", "recursive"),
    (_grammar("regex", "("), "GRAMMAR.definition", "unclosed group"),
]


@pytest.mark.parametrize(("tool", "field", "message"), REFUSED, ids=lambda value: str(value)[:50])
async def test_what_cannot_be_kept_is_refused_by_its_name(
    stage: Stage, tool: Any, field: str, message: str
) -> None:
    function = {"type": "function", "function": FUNCTION}
    form = tool.get("format")
    nested = in_chat(tool) if isinstance(form, dict) and form["type"] == "grammar" else None
    chat = {"messages": MESSAGES, "tools": [function, nested or {"type": "custom", "custom": tool}]}
    flat = {"input": "x", "tools": [{**FUNCTION, "type": "function"}, {**tool, "type": "custom"}]}
    places = {
        "/v1/chat/completions": (chat, "tools[1].custom", "format.grammar"),
        "/v1/responses": (flat, "tools[1]", "format"),
    }
    for path, (body, place, grammar) in places.items():
        reply = await stage.http.post(path, json=body)
        error = reply.json()["error"]
        named = f"{place}.{field.replace('GRAMMAR', grammar)}" if field else "tools[1]"
        assert (reply.status_code, error["param"]) == (400, named), error
        assert message in error["message"] and error["message"].startswith(named)
    assert not stage.preprocess.seen


async def test_choices_of_tools_that_are_none(stage: Stage) -> None:
    for chosen, field in (
        ({"type": "custom", "custom": {"name": "stop"}}, "custom.name"),
        ({"type": "function", "function": {"name": "shell"}}, "function.name"),
        ({"type": "custom", "custom": {}}, "custom.name"),
        ({"type": "custom"}, ""),
    ):
        reply = await stage.chat(tools=CHAT_TOOLS, tool_choice=chosen)
        error = reply.json()["error"]
        named = f"tool_choice.{field}".removesuffix(".")
        assert (reply.status_code, error["param"]) == (400, named), error
    for chosen in ({"type": "custom", "name": "stop"}, {"type": "function", "name": "shell"}):
        with pytest.raises(openai.BadRequestError, match="is not among the"):
            await stage.openai.responses.create(
                model=MODEL, input="x", tools=TOOLS, extra_body={"tool_choice": chosen}
            )
    large = in_chat(_grammar("lark", "start: " + "/./ " * 3000))
    reply = await stage.chat(tools=[large])
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "grammar_too_complex")
    reply = await stage.chat(tools=CHAT_TOOLS, guided_regex="a")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


async def test_a_custom_tool_that_has_to_be_called_in_a_response(stage: Stage) -> None:
    match = Acceptor(stage.tokenizer, "<|im_end|>")
    for chosen in (
        {"type": "custom", "name": "patch"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}],
        },
    ):
        asked: Any = {"tools": TOOLS, "tool_choice": chosen}
        whole = await stage.openai.responses.create(model=MODEL, input="x", **asked)
        rid = whole.id.removeprefix("resp_")
        grammar = stage.scheduler.played[rid].spec.sampling.grammar
        assert match.accepts(grammar, call("patch", {"input": PATCH}))
        assert not match.accepts(grammar, call("shell", {"input": PATCH}))
        assert not match.accepts(grammar, call("patch", {"input": "x"}))


async def test_tokenizing_tells_the_same(stage: Stage) -> None:
    body = {"messages": MESSAGES, "tools": CHAT_TOOLS}
    reply = await stage.http.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    listed = told(stage)
    await stage.chat(tools=CHAT_TOOLS)
    assert told(stage) == listed
