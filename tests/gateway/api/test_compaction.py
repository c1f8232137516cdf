"""A conversation becomes the messages of its user and a summary, with which OpenAI's client goes on."""

from typing import Any

import openai
import pytest

from services.gateway.gateway import Gateway
from tests.support.gateway.marked_model import MARKED, THOUGHT
from tests.support.gateway.stage import MAX_MODEL_LEN, MODEL, Stage
from tests.support.network.http import plain_client
from tests.support.pictures import data_url, png

# Its types of output know no messages of users: it warns, and sends back what came.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
STAGED_MODEL = MARKED
PATH = "/v1/responses/compact"
SUMMARY = "The file a.txt was read; it says 7. 剩下: delete it."
PICTURE = data_url(png(3))
HEAD = "Summary of what was said and done beside these messages of the user's:\n\n"


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATION: list[Any] = [
    message("developer", "Use tools."),
    message("user", "Read a.txt."),
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.txt"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "7"},
    message("assistant", "It says 7."),
    message("user", [{"type": "input_text", "text": "Delete it."}]),
]


def turns(stage: Stage) -> list[tuple[str, str]]:
    """Of the prompt that was prepared last."""
    seen = stage.preprocess.seen[-1].conversation.messages
    return [(turn.role, "".join(part.text for part in turn.content)) for turn in seen]


async def test_the_users_messages_stay_and_a_summary_goes_on_for_the_rest(stage: Stage) -> None:
    ids = stage.says(SUMMARY)
    compacted = await stage.openai.responses.compact(
        model=MODEL, input=CONVERSATION, instructions="Be brief."
    )
    assert compacted.object == "response.compaction" and compacted.id.startswith("resp_")
    assert compacted.usage.output_tokens == len(ids)
    assert compacted.usage.total_tokens == compacted.usage.input_tokens + len(ids)
    asked = turns(stage)
    assert [role for role, _ in asked] == [
        "system", "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    last = asked[-1][1]
    assert last.startswith("Delete it.\n\nThe conversation until here")
    output: list[Any] = [one.to_dict() for one in compacted.output]
    *kept, item = output
    assert [(one["role"], one["content"][0]["text"]) for one in kept] == [
        ("developer", "Use tools."),
        ("user", "Read a.txt."),
        ("user", "Delete it."),
    ]
    assert item["type"] == "compaction" and SUMMARY not in str(item["encrypted_content"])
    # As clients go on: with all that came, and what the user says next.
    given: Any = [*compacted.output, message("user", "Now?")]
    await stage.openai.responses.create(model=MODEL, input=given)
    assert turns(stage) == [
        ("system", "Use tools."),
        ("user", f"Read a.txt.\n\nDelete it.\n\n{HEAD}{SUMMARY}\n\nNow?"),
    ]
    # What has been compacted may be so again: the summary is read, and a new one takes its place.
    stage.says("Shorter.")
    again = await stage.openai.responses.compact(model=MODEL, input=given)
    assert SUMMARY in turns(stage)[-1][1]
    assert [one.type for one in again.output] == [*["message"] * 4, "compaction"]
    items = [one.to_dict() for one in again.output]
    await stage.openai.responses.create(model=MODEL, input=items)  # type: ignore[arg-type]
    assert turns(stage)[-1] == (
        "user",
        f"Read a.txt.\n\nDelete it.\n\nNow?\n\n{HEAD}Shorter.",
    )


async def test_a_kept_conversation_is_compacted_at_any_gateway(
    stage: Stage, other: Gateway
) -> None:
    stage.says("It is a circle.")
    parts = [
        {"type": "input_text", "text": "What is there?"},
        {"type": "input_image", "image_url": PICTURE},
    ]
    first = await stage.openai.responses.create(model=MODEL, input=[message("user", parts)])  # type: ignore[list-item]
    stage.says(SUMMARY)
    body = {"previous_response_id": first.id, "input": "And its colour?"}
    headers = {"authorization": "Bearer none"}
    async with plain_client(other.url) as http:
        reply = await http.post(PATH, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        *kept, item = reply.json()["output"]
        assert [one["content"][-1].get("text") for one in kept] == [None, "And its colour?"]
        assert kept[0]["content"][1] == parts[1]
        assert [role for role, _ in turns(stage)] == ["user", "assistant", "user"]
        reply = await http.post(PATH, json=body, headers={"authorization": "Bearer other"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")
    # It goes on as a conversation that is kept, too.
    given: Any = [*kept, item]
    second = await stage.openai.responses.create(model=MODEL, input=given)
    await stage.openai.responses.create(
        model=MODEL, input="Thanks.", previous_response_id=second.id
    )
    assert [role for role, _ in turns(stage)] == ["user", "assistant", "user"]
    assert turns(stage)[0][1].endswith(f"And its colour?\n\n{HEAD}{SUMMARY}")
    shown = stage.preprocess.seen[-1].conversation.messages[0].content
    assert [part.media.data for part in shown if part.HasField("media")] == [png(3)]
    counted = await stage.http.post(
        f"{PATH.rpartition('/')[0]}/input_tokens", json={"input": given}
    )
    assert counted.json()["input_tokens"] > 10


async def test_a_summary_has_a_bound_and_thoughts_are_none(stage: Stage) -> None:
    stage.says(f"<think>{THOUGHT}</think>{SUMMARY}")
    whole = await stage.openai.responses.compact(model=MODEL, input="Hello")
    [played] = stage.scheduler.played.values()
    assert played.spec.sampling.max_tokens == MAX_MODEL_LEN // 4
    given: Any = whole.output
    await stage.openai.responses.create(model=MODEL, input=given)
    assert turns(stage)[-1][1] == f"Hello\n\n{HEAD}{SUMMARY}"
    cut = await stage.openai.responses.compact(
        model=MODEL, input="Hello", extra_body={"max_output_tokens": 300}
    )
    assert [one.type for one in cut.output] == ["message", "compaction"]
    stage.says("<think>Hm.</think>")
    with pytest.raises(openai.InternalServerError, match="wrote no summary"):
        await stage.openai.responses.compact(model=MODEL, input="Hello")


async def test_what_cannot_be_compacted_or_gone_on_with_is_said(stage: Stage) -> None:
    stage.says(SUMMARY)
    compacted = await stage.openai.responses.compact(model=MODEL, input="Hello")
    content = compacted.output[-1].to_dict()["encrypted_content"]
    assert isinstance(content, str)
    for wrong in ("gAAAAAB", content[:-4], content[:-1] + "é", content.lower(), "", None):
        item: Any = {"type": "compaction", "encrypted_content": wrong}
        for path in ("/v1/responses", PATH):
            reply = await stage.http.post(path, json={"input": [message("user", "a"), item]})
            assert reply.status_code == 400, wrong
            assert reply.json()["error"]["param"] == "input[1].encrypted_content"
    for body, field in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "message"}]}, "input[0].role"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "tools": []}, "tools"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
    ):
        reply = await stage.http.post(PATH, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    long = message("user", "word " * 4000)
    reply = await stage.http.post(PATH, json={"input": [long]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "prompt_too_long")
