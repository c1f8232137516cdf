"""Responses that are kept: gone on with, asked for later, in the background, from any event on, and forgotten."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from services.gateway.gateway import Gateway, open_gateway
from services.gateway.timings import Timings
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import InvalidRequest
from shared.queue import connect
from shared.queue.keys import Keys
from tests.support.gateway.marked_model import ANSWER, MARKED, THOUGHT, WEATHER
from tests.support.gateway.process import beside
from tests.support.gateway.stage import MODEL, Stage, open_stage, until_ready
from tests.support.network.http import plain_client
from tests.support.network.sse import named_events
from tests.support.pictures import data_url, png

STAGED_MODEL = MARKED
PATH = "/v1/responses"
WORD = "w"
OURS = {"authorization": "Bearer none"}  # the tenant of the client
ASKED: dict[str, Any] = {"model": MODEL, "input": "What is the weather?"}
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "function", "name": "stop", "parameters": {"type": "object"}},
]


@pytest.fixture
async def elsewhere(other: Gateway) -> AsyncIterator[AsyncOpenAI]:
    """A client of the second gateway."""
    async with client_of(other.url) as client:
        yield client


def client_of(url: str, key: str = "none") -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)


def slow(stage: Stage, count: int = 400) -> asyncio.Event:
    """Lets answers stop behind their third token until the event is set."""
    go = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        if index == 3:
            await go.wait()

    token = stage.tokenizer.encode(WORD).ids
    assert len(token) == 1
    stage.scheduler.answer = lambda spec: [token] * count
    stage.scheduler.step = step
    return go


def dawdle(stage: Stage) -> None:
    """Lets answers be long, and slow."""
    slow(stage)

    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.02)

    stage.scheduler.step = step


async def until(client: AsyncOpenAI, name: str, status: str) -> Any:
    async with asyncio.timeout(60):
        while (found := await client.responses.retrieve(name)).status != status:
            await asyncio.sleep(0.02)
    return found


async def test_a_conversation_goes_on_at_another_gateway(
    stage: Stage, elsewhere: AsyncOpenAI
) -> None:
    stage.says(ANSWER)
    picture = {"type": "input_image", "image_url": data_url(png(3))}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "See"}, picture]}]
    first = await stage.openai.responses.create(
        model=MODEL, input=items, tools=TOOLS, instructions="A"
    )
    calls = [item for item in first.output if item.type == "function_call"]
    given: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    second = await elsewhere.responses.create(
        model=MODEL, input=given, tools=TOOLS, previous_response_id=first.id, instructions="B"
    )
    assert second.previous_response_id == first.id
    seen = stage.preprocess.seen[-1].conversation.messages
    assert [m.role for m in seen] == ["system", "user", "assistant", "tool", "tool"]
    assert seen[0].content[0].text == "B", "instructions are of one response alone"
    assert seen[1].content[1].media.data
    assert (seen[2].reasoning, seen[2].content[0].text) == (THOUGHT, "One moment.")
    made = json.loads(seen[2].tool_calls_json)
    assert (
        [one["id"] for one in made]
        == [call.call_id for call in calls]
        == [m.tool_call_id for m in seen[3:]]
    )
    assert made[0]["function"] == {"name": "weather", "arguments": json.loads(WEATHER)}
    stream = await stage.openai.responses.create(
        **ASKED, previous_response_id=second.id, stream=True
    )
    third: Any = [event async for event in stream][-1].response
    fourth = await elsewhere.responses.create(**ASKED, previous_response_id=third.id)
    assert [m.role for m in stage.preprocess.seen[-1].conversation.messages] == [
        "user", "assistant", "tool", "tool", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    for response in (first, second, third, fourth):
        assert (await elsewhere.responses.retrieve(response.id)).to_dict() == response.to_dict()
    counted = await elsewhere.responses.input_tokens.count(**ASKED, previous_response_id=third.id)
    assert fourth.usage is not None and counted.input_tokens == fourth.usage.input_tokens
    await elsewhere.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError, match=f"goes on with .*{second.id[-8:]}"):
        await elsewhere.responses.create(**ASKED, previous_response_id=third.id)


async def test_the_same_request_again_is_the_same_response(
    stage: Stage, elsewhere: AsyncOpenAI
) -> None:
    stage.says("Hi.")
    asked: Any = {**ASKED, "extra_headers": {"Idempotency-Key": "one"}}
    made = await stage.openai.responses.create(**asked)
    again = await elsewhere.responses.create(**asked)
    assert again.to_dict() == made.to_dict() and len(stage.scheduler.played) == 1
    assert (await elsewhere.responses.retrieve(made.id)).to_dict() == made.to_dict()


async def test_items_are_named_by_their_ids(stage: Stage, elsewhere: AsyncOpenAI) -> None:
    stage.says(ANSWER)
    first = await stage.openai.responses.create(**ASKED, tools=TOOLS)
    names: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    given: Any = [
        {"role": "user", "content": ASKED["input"]},
        *names,
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    second = await elsewhere.responses.create(model=MODEL, input=given, tools=TOOLS)
    seen = stage.preprocess.seen[-1].conversation.messages
    assert [m.role for m in seen] == ["user", "assistant", "tool"]
    assert (seen[1].reasoning, seen[1].content[0].text) == (THOUGHT, "One moment.")
    listed = [item async for item in elsewhere.responses.input_items.list(second.id, order="asc")]
    assert [item.id for item in listed][1:-1] == [item.id for item in first.output]
    no_response = f"rs_r_5460ff1b_{'0' * 32}_0"
    strangers: list[Any] = ["msg_1", names[0]["id"] + "9", no_response, None, {}, [1], 7]
    for name in strangers:
        body = {"input": [{"type": "item_reference", "id": name}]}
        reply = await stage.http.post(PATH, json=body, headers=OURS)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[0].id")


async def test_what_stands_beside_a_name_costs_its_request_alone(stage: Stage) -> None:
    stage.says(ANSWER)
    first = await stage.openai.responses.create(**ASKED, tools=TOOLS)
    name = json.dumps({"type": "item_reference", "id": first.output[0].id})
    deep = "[" * 900 + "]" * 900
    said = '{{"role": "user", "content": "{}"}}'
    for near in (
        deep,
        f'{{"content": {deep}}}',
        said.format("\\ud800"),
        said.format("\xe9"),
        '{"type": "\xe9"}',
    ):
        body = f'{{"model": "{MODEL}", "input": [{name}, {near}]}}'.encode("latin-1")
        reply = await stage.http.post(PATH, content=body, headers=OURS)
        assert reply.status_code == 400, reply.text


async def test_what_was_asked_is_listed(stage: Stage) -> None:
    stage.says("Hi.")
    items: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c", "name": "x", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c", "output": "three"},
    ]
    made = await stage.openai.responses.create(model=MODEL, input=items)
    page = await stage.openai.responses.input_items.list(made.id, limit=3, order="asc")
    assert [item.type for item in page.data] == ["message", "message", "function_call"]
    assert page.has_more and page.data[2].id == "fc_1"
    listed = [item async for item in stage.openai.responses.input_items.list(made.id, limit=3)]
    assert [item.type for item in listed] == [
        "function_call_output", "function_call", "message", "message",
    ]  # fmt: skip
    assert listed[3].to_dict()["content"] == [{"type": "input_text", "text": "one"}]
    plain = await stage.openai.responses.create(**ASKED)
    [item] = (await stage.openai.responses.input_items.list(plain.id)).data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": ASKED["input"]}]
    for query in ("order=up", "limit=0", "limit=x", "after=nobody"):
        reply = await stage.http.get(f"{PATH}/{made.id}/input_items?{query}", headers=OURS)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_response_in_the_background(stage: Stage, elsewhere: AsyncOpenAI) -> None:
    go = slow(stage, 20)
    made = await stage.openai.responses.create(**ASKED, background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    await until(elsewhere, made.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        await elsewhere.responses.create(**ASKED, previous_response_id=made.id)
    go.set()
    done = await until(elsewhere, made.id, "completed")
    assert done.output_text == WORD * 20 and done.usage.output_tokens == 20
    after = await stage.openai.responses.create(**ASKED, previous_response_id=made.id)
    assert after.status == "completed"
    page = (await stage.http.get("/metrics")).text
    [tokens] = [
        line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total")
    ]
    assert float(tokens.split()[-1]) == 40, "each is counted once, at the gateway that made it"


async def test_a_background_response_goes_on_from_any_event(
    stage: Stage, elsewhere: AsyncOpenAI
) -> None:
    go = slow(stage, 12)
    stream = await stage.openai.responses.create(**ASKED, background=True, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    go.set()
    name = seen[0].response.id
    rest = await elsewhere.responses.retrieve(
        name, stream=True, starting_after=seen[-1].sequence_number
    )
    seen += [event async for event in rest]
    numbers = [event.sequence_number for event in seen]
    assert numbers == sorted(set(numbers)) and seen[-1].type == "response.completed"
    texts = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(texts) == WORD * 12 == seen[-1].response.output_text
    whole = named_events((await stage.http.get(f"{PATH}/{name}?stream=true", headers=OURS)).text)
    assert [one.content["sequence_number"] for one in whole][:3] == [0, 1, 2]
    for one in whole:
        number = one.content["sequence_number"]
        found = await stage.http.get(
            f"{PATH}/{name}?stream=true&starting_after={number}", headers=OURS
        )
        later = [event.content["sequence_number"] for event in named_events(found.text)]
        assert all(other > number for other in later)
        assert (later[-1:] or [number]) == [whole[-1].content["sequence_number"]]
    async with elsewhere.responses.stream(response_id=name, starting_after=2) as managed:
        final = await managed.get_final_response()
    assert final.output_text == WORD * 12
    bad = await stage.http.get(f"{PATH}/{name}?stream=true&starting_after=-3", headers=OURS)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "starting_after")


async def test_a_response_is_cancelled_and_forgotten(stage: Stage, elsewhere: AsyncOpenAI) -> None:
    dawdle(stage)
    made = await stage.openai.responses.create(**ASKED, background=True)
    await until(elsewhere, made.id, "in_progress")
    assert (await elsewhere.responses.cancel(made.id)).status == "cancelled"
    assert (await stage.openai.responses.retrieve(made.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await elsewhere.responses.create(**ASKED, previous_response_id=made.id)
    await elsewhere.responses.delete(made.id)
    for call in (
        stage.openai.responses.retrieve(made.id),
        stage.openai.responses.delete(made.id),
        stage.openai.responses.cancel(made.id),
        stage.openai.responses.retrieve("resp_nobody"),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.openai.responses.create(**ASKED, previous_response_id=made.id)
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )
    other = await stage.openai.responses.create(**ASKED, background=True)
    await elsewhere.responses.delete(other.id)
    async with asyncio.timeout(60):
        while await stage.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)


async def test_a_response_that_fails_says_so(stage: Stage) -> None:
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("Hi").ids]
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    made = await stage.openai.responses.create(**ASKED, background=True)
    failed = await until(stage.openai, made.id, "failed")
    assert failed.error is not None and failed.error.message == "it broke"


async def test_what_is_not_kept_is_not_found(stage: Stage) -> None:
    stage.says("Hi.")
    made = await stage.openai.responses.create(**ASKED, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await stage.openai.responses.retrieve(made.id)
    async with connect(stage.settings.redis_url) as redis:
        assert not await redis.keys(f"{Keys(MODEL).prefix}:response*")


async def test_tenants_have_responses_of_their_own(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with (
        open_stage(redis_url, model_folder, tokenizer, api_key="one,two") as stage,
        client_of(stage.gateway.url, "one") as one,
        client_of(stage.gateway.url, "two") as two,
    ):
        made = await one.responses.create(**ASKED)
        assert (await one.responses.retrieve(made.id)).id == made.id
        for call in (two.responses.retrieve(made.id), two.responses.delete(made.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="no response"):
            await two.responses.create(**ASKED, previous_response_id=made.id)


async def test_a_server_that_keeps_none(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, response_keep=0) as stage:
        made = await stage.openai.responses.create(**ASKED)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await stage.openai.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="--response-keep"):
            await stage.openai.responses.create(**ASKED, background=True)
        named: Any = [{"type": "item_reference", "id": "msg_1"}]
        with pytest.raises(openai.BadRequestError, match="--response-keep"):
            await stage.openai.responses.create(model=MODEL, input=named)


async def test_the_oldest_make_room(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, response_store_bytes=12_000) as stage:
        stage.says("Hi.")
        made = [await stage.openai.responses.create(**ASKED) for _ in range(8)]
        for response in made[-2:]:
            assert (await stage.openai.responses.retrieve(response.id)).output_text == "Hi."
        with pytest.raises(openai.NotFoundError):
            await stage.openai.responses.retrieve(made[0].id)
        async with connect(redis_url) as redis:
            keys = await redis.keys(f"{Keys(MODEL).prefix}:response:*")
            total = int(await redis.get(f"{Keys(MODEL).prefix}:responses:total") or 0)
        assert 0 < total <= 12_000 and len(keys) < 8


async def test_a_response_that_cannot_be_kept_is_not_made(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, response_store_bytes=4000) as stage:
        dawdle(stage)
        metadata = {f"name {number}": "x" * 500 for number in range(9)}
        with pytest.raises(openai.BadRequestError) as caught:
            await stage.openai.responses.create(**ASKED, metadata=metadata, background=True)
        assert (caught.value.param, caught.value.code) == ("store", "response_too_large")
        async with asyncio.timeout(60):
            while await stage.scheduler.queue.depth() != (0, 0):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("timings", [Timings(sweep_s=0.2)])
async def test_a_response_whose_gateway_died_is_finished_by_another(
    stage: Stage,
) -> None:
    """Whoever asks, and whether anybody does."""
    go = slow(stage, 10)
    async with beside(stage) as (process, client):
        reply = await client.post(PATH, json=ASKED | {"background": True}, headers=OURS)
        name = reply.json()["id"]
        await until(stage.openai, name, "in_progress")
        process.kill()
        await process.wait()
    go.set()
    keys = Keys(MODEL)
    async with connect(stage.settings.redis_url) as redis, asyncio.timeout(60):
        record = keys.response(name.removeprefix("resp_"))
        while not await redis.hexists(record, "response"):
            await asyncio.sleep(0.05)
        assert not await redis.zcard(keys.open_responses)
        await redis.delete(keys.request(name.removeprefix("resp_")))  # forgotten by the queue
    done = await stage.openai.responses.retrieve(name)
    assert (done.status, done.output_text) == ("completed", WORD * 10)


async def test_a_response_survives_a_shutdown_of_its_gateway(stage: Stage, other: Gateway) -> None:
    go = slow(stage, 10)
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2})
    async with open_gateway(settings) as third, plain_client(third.url) as client:
        await until_ready(client)
        reply = await client.post(PATH, json=ASKED | {"background": True}, headers=OURS)
    go.set()
    async with client_of(other.url) as client:
        done = await until(client, reply.json()["id"], "completed")
    assert done.output_text == WORD * 10


async def test_a_redis_that_lost_everything_gets_it_again(
    short_tmp: Path, model_folder: Path, tokenizer: Tokenizer
) -> None:
    with EmbeddedRedis(short_tmp / "redis", short_tmp / "r.sock", persistent=False) as server:
        async with open_stage(server.url, model_folder, tokenizer) as stage:
            go = slow(stage, 10)
            made = await stage.openai.responses.create(**ASKED, background=True)
            await until(stage.openai, made.id, "in_progress")
            server.kill()
            server.start()
            async with asyncio.timeout(60), connect(server.url) as redis:
                record = Keys(MODEL).response(made.id.removeprefix("resp_"))
                while not await _there(redis, record):
                    await asyncio.sleep(0.05)
            go.set()
            done = await until(stage.openai, made.id, "completed")
            assert done.output_text == WORD * 10
            after = await stage.openai.responses.create(**ASKED, previous_response_id=made.id)
            assert after.status == "completed"


async def _there(redis: Any, key: str) -> bool:
    try:
        return bool(await redis.exists(key))
    except RedisError:
        return False
