"""What clients of Anthropic's API ask beside messages: thoughts of earlier turns cleared, models listed; and calls as
the model wrote them.
"""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.gateway.api.test_anthropic import BODY, MESSAGES, PATH, TOOLS, anthropic_client
from tests.support.gateway.marked_model import MARKED
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
