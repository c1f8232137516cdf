"""Several choices of one request: streams that interleave, one usage, one end."""

import asyncio
from typing import Any

import openai
import pytest

from shared.errors import Internal
from shared.queue import connect
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.gateway.stage import MODEL, Stage, answer_slowly
from tests.support.network.sse import event_ids, events, texts_of
from tests.support.tokenizers import token_id

MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
TEXTS = ["The red circle", "a blue square 🦊", "", "two small dogs and a cat"]


def says_texts(stage: Stage, texts: list[str]) -> list[list[int]]:
    """Lets choice c answer with text c and the end-of-sequence token; the ids of each."""
    eos = token_id(stage.tokenizer, "<|im_end|>")
    ids: list[list[int]] = [[*stage.tokenizer.encode(text).ids, eos] for text in texts]

    def answer(spec: RequestSpec, choice: int) -> list[list[int]]:
        return [[token] for token in ids[choice]]

    stage.scheduler.answer_choice = answer
    return ids


async def test_the_openai_client_gets_all_choices_in_order(stage: Stage) -> None:
    ids = says_texts(stage, TEXTS)
    reply = await stage.openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.message.content for choice in reply.choices] == TEXTS
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 4
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(map(len, ids))
    completion = await stage.openai.completions.create(model=MODEL, prompt="The", n=2, echo=True)
    assert [choice.text for choice in completion.choices] == [f"The{text}" for text in TEXTS[:2]]


async def test_streams_interleave_and_end_once(stage: Stage) -> None:
    ids = says_texts(stage, TEXTS)
    options: Any = {"include_usage": True}
    stream = await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=4, stream=True, stream_options=options
    )
    texts, reasons, order = [""] * 4, [""] * 4, []
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        order.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason or ""
    assert texts == TEXTS and reasons == ["stop"] * 4
    assert order != sorted(order), "choices come as they are made"
    assert [chunk.choices[0].delta.role for chunk in chunks[:4]] == ["assistant"] * 4
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sum(map(len, ids))


async def test_event_ids_count_every_choice(stage: Stage) -> None:
    ids = says_texts(stage, TEXTS)
    reply = await stage.chat(with_ids=True, n=4, stream=True)
    rid = reply.headers["x-request-id"]
    found = event_ids(reply.text)
    assert found[:4] == [f"{rid}/h1", f"{rid}/h2", f"{rid}/h3", f"{rid}/0.0.0.0"]
    assert found[-1] == f"{rid}/" + ".".join(f"{len(i)}e" for i in ids)
    assert texts_of(events(reply.text)) == dict(enumerate(TEXTS))
    assert reply.text.count("[DONE]") == 1


async def test_each_choice_ends_its_own_way(stage: Stage) -> None:
    says_texts(stage, ["one STOP two", "one two three four five six", "ok"])
    for stream in (False, True):
        reply = await stage.chat(n=3, stop="STOP", max_tokens=8, stream=stream)
        chunks = events(reply.text) if stream else [reply.json()]
        choices = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices}
        assert ends == {0: ("stop", "STOP"), 1: ("length", None), 2: ("stop", None)}
        if stream:
            assert texts_of(chunks)[0] == "one "
        else:
            assert choices[0]["message"]["content"] == "one "


async def test_lost_messages_of_any_choice_are_read(stage: Stage) -> None:
    """Redis closes the channel in the middle: what was said meanwhile is in the logs."""
    says_texts(stage, ["word " * 20, "other " * 20, "third " * 20])
    redis = connect(stage.settings.redis_url)

    async def cut(rid: str, index: int) -> None:
        if index == 6:
            await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    stage.scheduler.step = cut
    reply = await stage.chat(n=3, stream=True)
    assert texts_of(events(reply.text)) == {0: "word " * 20, 1: "other " * 20, 2: "third " * 20}
    await redis.aclose()


async def test_an_error_of_one_choice_ends_the_answer_and_cancels_the_others(stage: Stage) -> None:
    word = stage.tokenizer.encode("word").ids

    def answer(spec: RequestSpec, choice: int) -> Any:
        return [word] if choice == 1 else (word for _ in range(400))

    async def slowly(rid: str, index: int) -> None:
        await asyncio.sleep(0.02)

    stage.scheduler.answer_choice = answer
    stage.scheduler.step = slowly
    stage.scheduler.failure, stage.scheduler.failing = Internal("NAN_LOGITS", "x").to_failure(), {1}
    reply = await stage.chat(n=3)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "nan_logits")
    played = stage.scheduler.played[reply.headers["x-request-id"]]
    async with asyncio.timeout(60):
        await played.ended.wait()
        while await stage.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)
    assert played.cancelled
    reply = await stage.chat(n=3, stream=True)
    assert '"code": "nan_logits"' in reply.text and "[DONE]" not in reply.text


async def test_a_client_that_leaves_cancels_every_choice(stage: Stage) -> None:
    answer_slowly(stage)
    stream = await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, stream=True
    )
    seen = set()
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            seen.add(chunk.choices[0].index)
        if len(seen) == 3:
            break
    await stream.close()
    played = await stage.scheduler.taken()
    async with asyncio.timeout(60):
        await played.ended.wait()
        while await stage.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)
    assert played.cancelled


async def test_the_best_come_all_at_once(stage: Stage) -> None:
    says_texts(stage, TEXTS)
    reply = await stage.openai.completions.create(model=MODEL, prompt="x", n=2, best_of=5)
    assert [choice.text for choice in reply.choices] == TEXTS[:2]
    found = await stage.openai.completions.create(
        model=MODEL,
        prompt="x",
        n=2,
        extra_body={"use_beam_search": True, "best_of": 4, "length_penalty": 0.5},
    )
    assert [choice.text for choice in found.choices] == TEXTS[:2]
    specs = [played.spec for played in stage.scheduler.played.values()]
    assert [(s.sampling.n, s.sampling.best_of) for s in specs] == [(2, 5), (2, 4)]
    assert specs[1].sampling.use_beam_search and specs[1].sampling.temperature == 0
    assert specs[1].sampling.length_penalty == 0.5


async def test_the_cost_counts_every_candidate(stage: Stage) -> None:
    stage.scheduler.taking = False
    body: Any = {"prompt": [5, 6, 7], "n": 2, "best_of": 4, "max_tokens": 10}
    task = asyncio.create_task(stage.http.post("/v1/completions", json=body))
    await stage.admitted(1)
    assert await stage.scheduler.queue.depth() == (1, 3 + 4 * 10)
    stage.scheduler.taking = True
    assert (await task).status_code == 200


async def test_lower_priority_goes_first(stage: Stage) -> None:
    stage.scheduler.taking = False
    tasks = []
    for priority in (3, 0, -2, 1):
        tasks.append(asyncio.create_task(stage.chat(priority=priority, seed=10 + priority)))
        await stage.admitted(len(tasks))
    stage.scheduler.taking = True
    await asyncio.gather(*tasks)
    seeds = [played.spec.sampling.seed for played in stage.scheduler.played.values()]
    assert seeds == [8, 10, 11, 13]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=str)
async def test_what_cannot_be_is_a_400_by_name(
    stage: Stage, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body=change
        )
    assert caught.value.param == field
