"""Options of responses: log-probabilities of texts, and conversations that are cut to the model's length."""

from typing import Any

import openai
import pytest

from tests.support.gateway.marked_model import ANSWER, MARKED, THOUGHT
from tests.support.gateway.stage import MAX_MODEL_LEN, MODEL, Stage

STAGED_MODEL = MARKED
QUESTION = "What is the weather?"
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "function", "name": "stop", "parameters": {"type": "object"}},
]
INCLUDE: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_texts_have_the_log_probabilities_of_their_tokens(
    stage: Stage, tools: list[Any]
) -> None:
    """Not those of thoughts and calls; the same whole, streamed, and asked for later."""
    stage.says(ANSWER, size=3)
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": tools, "include": INCLUDE}
    whole: Any = await stage.openai.responses.create(**asked, top_logprobs=2)
    assert whole.top_logprobs == 2
    [text] = [item.content[0] for item in whole.output if item.type == "message"]
    shown = b"".join(bytes(entry.bytes) for entry in text.logprobs).decode()
    assert shown.strip() == text.text if tools else shown.strip().startswith("One moment.")
    chat = await stage.chat(logprobs=True, top_logprobs=2)
    by_name = chat.json()["choices"][0]["logprobs"]["content"]
    for entry in text.logprobs:
        assert entry.model_dump() in by_name, "entries are those of chats"

    stream = await stage.openai.responses.create(**asked, top_logprobs=2, stream=True)
    events: list[Any] = [event async for event in stream]
    streamed = [
        entry.to_dict()
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.to_dict() for entry in text.logprobs]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.to_dict() for entry in done.logprobs] == streamed
    assert events[-1].response.output_text == whole.output_text
    later: Any = await stage.openai.responses.retrieve(events[-1].response.id)
    assert later.model_dump()["output"] == events[-1].response.model_dump()["output"]


async def test_without_asking_there_are_none(stage: Stage) -> None:
    whole: Any = await stage.openai.responses.create(model=MODEL, input=QUESTION)
    [text] = [item.content[0] for item in whole.output if item.type == "message"]
    assert text.logprobs == []
    [played] = stage.scheduler.played.values()
    assert not played.spec.sampling.HasField("logprobs")
    bare: Any = await stage.openai.responses.create(model=MODEL, input=QUESTION, include=INCLUDE)
    [text] = [item.content[0] for item in bare.output if item.type == "message"]
    assert text.logprobs and not any(entry.top_logprobs for entry in text.logprobs)


async def test_truncation_leaves_room_for_the_answer(stage: Stage) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION, "max_output_tokens": 50}
    made = await stage.openai.responses.create(**asked, truncation="auto")
    assert made.truncation == "auto"
    assert stage.preprocess.seen[-1].max_window_size == MAX_MODEL_LEN - 49
    await stage.openai.responses.create(**asked)
    assert not stage.preprocess.seen[-1].HasField("max_window_size")
    with pytest.raises(openai.BadRequestError, match="truncation must be one of auto, disabled"):
        await stage.openai.responses.create(**asked, truncation="never")  # type: ignore[call-overload]


async def test_what_is_not_offered_is_taken_where_it_asks_for_nothing(stage: Stage) -> None:
    names = ("conversation", "prompt", "context_management", "moderation")
    nothing: Any = dict.fromkeys(names)
    options = {"prompt_cache_options": {"mode": "implicit"}}
    reply = await stage.http.post("/v1/responses", json={"input": QUESTION, **nothing, **options})
    assert reply.status_code == 200, reply.text
    for name in names:
        reply = await stage.http.post("/v1/responses", json={"input": QUESTION, name: {"id": "x"}})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, name)
        assert "is not a field" not in error["message"], "it says what to do"


async def test_thoughts_are_the_summary_where_one_was_asked_for(stage: Stage) -> None:
    stage.says(ANSWER)
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": TOOLS}
    summary: Any = {"reasoning": {"summary": "auto"}}
    plain: Any = await stage.openai.responses.create(**asked)
    whole: Any = await stage.openai.responses.create(**asked, **summary)
    assert [part.text for part in plain.output[0].content] == [THOUGHT]
    assert plain.output[0].summary == [] == whole.output[0].content
    assert [(p.type, p.text) for p in whole.output[0].summary] == [("summary_text", THOUGHT)]

    stream = await stage.openai.responses.create(**asked, **summary, stream=True)
    events: list[Any] = [event async for event in stream]
    kinds = [event.type for event in events]
    first = kinds.index("response.reasoning_summary_part.added")
    assert kinds[first - 1] == "response.output_item.added"
    deltas = [e for e in events if e.type == "response.reasoning_summary_text.delta"]
    assert "".join(event.delta for event in deltas) == THOUGHT
    last = first + len(deltas) + 1
    assert kinds[last : last + 3] == [
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert all(event.summary_index == 0 for event in events[first : last + 2])
    assert events[last].text == events[last + 1].part.text == THOUGHT
    assert not any(kind.startswith("response.reasoning_text") for kind in kinds)
    ended = events[-1].response
    assert ended.output[0].to_dict() == events[last + 2].item.to_dict()
    later: Any = await stage.openai.responses.retrieve(ended.id)
    assert later.output[0].to_dict() == ended.output[0].to_dict()
    # Events have the numbers that they have without a summary.
    without = await stage.openai.responses.create(**asked, stream=True)
    numbers = [event.sequence_number async for event in without]
    assert numbers[-1] == events[-1].sequence_number
    rest = await stage.openai.responses.retrieve(ended.id, stream=True, starting_after=4)
    assert (await anext(aiter(rest))).type == "response.reasoning_summary_text.delta"
    # What comes of it is a thought of an earlier turn.
    await stage.openai.responses.create(**asked, previous_response_id=whole.id)
    turns = stage.preprocess.seen[-1].conversation.messages
    assert [turn.reasoning for turn in turns if turn.role == "assistant"] == [THOUGHT]
