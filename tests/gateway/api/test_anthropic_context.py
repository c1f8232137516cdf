"""What clients of Anthropic's API ask beside messages: thoughts of earlier turns cleared, models listed; and calls as
the model wrote them.
"""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.gateway.api.test_anthropic import BODY, MESSAGES, PATH, TOOLS, anthropic_client
from tests.support.gateway.marked_model import ANSWER, FIRST, MARKED, THOUGHT
from tests.support.gateway.stage import MODEL, Stage

if TYPE_CHECKING:  # it takes seconds, of which workers that do not run these tests have no use
    from anthropic import AsyncAnthropic

STAGED_MODEL = MARKED


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator["AsyncAnthropic"]:
    async with anthropic_client(stage) as opened:
        yield opened


@pytest.mark.parametrize(
    ("edits", "kept"),
    [
        ([], ["a", "b", "c"]),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], ["a", "b", "c"]),
        ([{"type": "clear_thinking_20251015"}], ["", "", "c"]),
        (
            [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}],
            ["", "b", "c"],
        ),
    ],
)
async def test_thoughts_of_earlier_turns_are_cleared(
    stage: Stage, client: "AsyncAnthropic", edits: Any, kept: list[str]
) -> None:
    turns = [*MESSAGES]
    for thought in "abc":
        content = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "Well."}]
        turns += [{"role": "assistant", "content": content}, *MESSAGES]
    managed: Any = {"context_management": {"edits": edits}}
    asked: dict[str, Any] = {**BODY, "messages": turns}
    await client.beta.messages.create(**asked, **managed, betas=["context-management-2025-06-27"])
    asked.pop("max_tokens")
    await client.beta.messages.count_tokens(**asked, **managed)
    for request in stage.preprocess.seen[-2:]:
        said = [m.reasoning for m in request.conversation.messages if m.role == "assistant"]
        assert said == kept


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"type": "clear_tool_uses_20250919"}, "context_management.edits[0].type"),
        ({"type": "clear_thinking_20251015", "keep": 1}, "context_management.edits[0].keep"),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
            "context_management.edits[0].keep",
        ),
    ],
)
async def test_other_edits_are_refused(stage: Stage, edit: Any, field: str) -> None:
    body = BODY | {"context_management": {"edits": [edit]}}
    reply = await stage.http.post(PATH, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(field)


async def test_a_listed_model_is_as_anthropics_client_knows_it(
    stage: Stage, client: "AsyncAnthropic"
) -> None:
    listed = await client.models.list()
    [model] = listed.data
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert model.created_at.timestamp() == stage.gateway.model.created_unix_s
    assert (listed.first_id, listed.last_id, listed.has_more) == (MODEL, MODEL, False)


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": 1e999}', '{"a": 1.0}'])
async def test_what_a_call_is_made_with_is_what_the_model_wrote(
    stage: Stage, arguments: str
) -> None:
    """Also what is no text, or no number, to a reader."""
    stage.says(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    reply = await stage.http.post(PATH, json={**BODY, "tools": TOOLS})
    assert reply.status_code == 200, reply.text
    assert f'"input":{arguments}' in reply.text
    [block] = reply.json()["content"]
    assert block["input"] == json.loads(arguments)


async def test_the_loop_of_the_anthropic_client_calls_tools(
    stage: Stage, client: "AsyncAnthropic"
) -> None:
    """It asks for its conversation to be kept on the server, and sends all of it each time where that is not so."""
    from anthropic import beta_async_tool

    asked = []

    @beta_async_tool
    async def weather(city: str, days: list[object]) -> str:
        """How it is."""
        asked.append((city, days))
        stage.says("It is sunny.")
        return "sunny"

    stage.says(FIRST)
    runner = client.beta.messages.tool_runner(**BODY, tools=[weather])
    ended = await runner.until_done()
    assert (ended.stop_reason, len(asked)) == ("end_turn", 1)
    roles = [m.role for m in stage.preprocess.seen[-1].conversation.messages]
    assert roles == ["user", "assistant", "tool"]


async def test_what_asks_for_nothing_is_taken(stage: Stage) -> None:
    nothing: Any = {
        "thread": None, "container": None, "mcp_servers": [], "fallbacks": [], "speed": "standard",
        "inference_geo": None, "compaction": None, "diagnostics": None, "output_format": None,
        "billing_policy": None, "fallback_credit_token": None,
    }  # fmt: skip
    for path in (PATH, f"{PATH}/count_tokens"):
        body = BODY | nothing
        if path != PATH:
            body.pop("max_tokens")
        reply = await stage.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
    for change, said in (
        ({"container": "x"}, "container names"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers names"),
        ({"speed": "fast"}, "speed must be"),
        ({"fallbacks": [{"model": "x"}]}, "fallbacks names"),
        ({"thread": {"type": "create"}}, "thread is not offered"),
    ):
        error = (await stage.http.post(PATH, json=BODY | change)).json()["error"]
        assert error["message"].startswith(said)
    assert error["details"]["error_code"] == "thread_unsupported_request"


async def test_documents_and_search_results_are_shown_as_text(stage: Stage) -> None:
    ones: Any = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "It rains."},
            "title": "Report",
            "context": "of today",
            "citations": {"enabled": False},
        },
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
        {
            "type": "search_result",
            "source": "https://example.org",
            "title": "Found",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
        },
    ]  # fmt: skip
    called = {"type": "tool_use", "id": "c1", "name": "x", "input": {}}
    turns: Any = [
        {"role": "user", "content": ones},
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": ones}]},
    ]  # fmt: skip
    reply = await stage.http.post(PATH, json=BODY | {"messages": turns})
    assert reply.status_code == 200, reply.text
    said = ["Report\nof today\nIt rains.", "a", "Found\nhttps://example.org\nb\nc"]
    user, _, tool = stage.preprocess.seen[-1].conversation.messages
    assert [part.text for part in user.content] == said == [part.text for part in tool.content]
    for block, field in (
        ({"type": "document", "source": {"type": "base64", "data": "AA=="}}, "source.type"),
        ({"type": "document", "source": {"type": "text"}}, "source.data"),
        ({"type": "document", "source": "x"}, "source"),
        ({"type": "search_result", "source": {"type": "text"}, "content": "x"}, "source"),
        ({"type": "search_result", "source": "x"}, "content"),
        (ones[0] | {"citations": {"enabled": True}}, "citations"),
    ):
        body = BODY | {"messages": [{"role": "user", "content": [block]}]}
        error = (await stage.http.post(PATH, json=body)).json()["error"]
        assert error["message"].startswith(f"messages[0].content[0].{field} "), error


async def test_the_older_name_of_an_answers_form(stage: Stage) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    reply = await stage.http.post(PATH, json=BODY | {"output_format": form})
    assert reply.status_code == 200, reply.text
    [played] = stage.scheduler.played.values()
    assert played.spec.sampling.grammar
    both = BODY | {"output_format": form, "output_config": {"format": form}}
    assert (await stage.http.post(PATH, json=both)).status_code == 400


async def test_thoughts_are_signed_that_clients_send_them_back(
    stage: Stage, client: "AsyncAnthropic"
) -> None:
    stage.says(ANSWER)
    whole: Any = await client.messages.create(**BODY, tools=TOOLS)
    rid = whole.id.removeprefix("msg_")
    assert [(b.thinking, b.signature) for b in whole.content if b.type == "thinking"] == [
        (THOUGHT, f"{rid}_0")
    ]
    async with client.messages.stream(**BODY, tools=TOOLS) as stream:
        events: list[Any] = [event async for event in stream]
        final: Any = await stream.get_final_message()
    assert final.content[0].signature == final.id.removeprefix("msg_") + "_0"
    signed = [e for e in events if getattr(getattr(e, "delta", None), "type", "") == "signature_delta"]  # fmt: skip
    assert [event.index for event in signed] == [0]
    behind = [event.type for event in events[events.index(signed[0]) + 1 :]]
    assert "content_block_stop" in behind[:2]
    said = [{"role": "assistant", "content": final.content[:2]}, *MESSAGES]
    await client.messages.create(**BODY | {"messages": [*MESSAGES, *said]}, tools=TOOLS)
    turns = stage.preprocess.seen[-1].conversation.messages
    assert [turn.reasoning for turn in turns] == ["", THOUGHT, ""]
