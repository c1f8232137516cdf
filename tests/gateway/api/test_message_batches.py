"""Message batches as Anthropic's client sees them: each request has one result, whichever gateway ends."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.gateway import Gateway
from services.gateway.timings import Timings
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.token_log import decode_tokens
from tests.support.gateway.process import beside
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.tokenizers import token_id

PATH = "/v1/messages/batches"
QUICK = Timings(batch_lease_s=1.0)


@pytest.fixture
def timings() -> Timings:
    return QUICK


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(stage.gateway.url) as opened:
        yield opened


def client_of(url: str, key: str = "none") -> AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=http)


def request(name: str, **params: Any) -> Any:
    messages = [{"role": "user", "content": f"Say {name}"}]
    return {
        "custom_id": name,
        "params": {"model": MODEL, "max_tokens": 64, "messages": messages, **params},
    }


def named(count: int) -> list[str]:
    return [f"r-{number}" for number in range(count)]


async def ended(client: AsyncAnthropic, batch_id: str, seconds: float = 60) -> Any:
    async with asyncio.timeout(seconds):
        found = await client.messages.batches.retrieve(batch_id)
        while found.processing_status != "ended":
            assert found.results_url is None and found.ended_at is None
            await asyncio.sleep(0.05)
            found = await client.messages.batches.retrieve(batch_id)
    return found


async def results_of(client: AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    found = [one async for one in await client.messages.batches.results(batch_id)]
    results = {one.custom_id: one.result for one in found}
    assert len(results) == len(found)
    return results


def counts_of(batch: Any) -> dict[str, int]:
    return {kind: count for kind, count in batch.request_counts.model_dump().items() if count}


def hold(stage: Stage, but: int = 0) -> asyncio.Event:
    """Lets all answers but the first few stop behind their second token until the event is set."""
    go_on = asyncio.Event()
    begun: list[str] = []

    async def step(rid: str, index: int) -> None:
        if index == 2 and rid not in begun:
            begun.append(rid)
            if begun.index(rid) >= but:
                await go_on.wait()

    stage.scheduler.step = step
    return go_on


async def test_each_request_has_the_result_that_its_message_would_have(
    stage: Stage, client: AsyncAnthropic
) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    requests = [
        request("right"),
        request("hot", temperature=9),
        request("unknown", colour="red"),
        request("empty", messages=[]),
        request("streams", stream=True),
        request("another", model="no-such-model"),
        request("none", max_tokens=0),
        request("calls", tools=[tool], tool_choice={"type": "none"}),
        {"custom_id": "bare", "params": {}},
        {"custom_id": "last_1", "params": {**request("last")["params"], "system": "a\u2028b"}},
    ]
    batch = await client.messages.batches.create(requests=requests)
    assert batch.id.startswith("msgbatch_") and batch.type == "message_batch"
    assert batch.processing_status == "in_progress" and counts_of(batch) == {"processing": 10}
    assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
    batch = await ended(client, batch.id)
    assert counts_of(batch) == {"succeeded": 3, "errored": 7}
    assert batch.ended_at >= batch.created_at and batch.archived_at is None
    results = await results_of(client, batch.id)
    assert [*results] == [one["custom_id"] for one in requests]
    for name in ("right", "calls", "last_1"):
        message = results[name].message
        assert results[name].type == "succeeded" and message.type == "message"
        assert message.content[0].text == ANSWER and message.stop_reason == "end_turn"
        assert message.usage.output_tokens > 0
    for name, says in {
        "hot": "temperature",
        "unknown": "colour is not a field",
        "empty": "messages",
        "streams": "stream must be false",
        "none": "max_tokens",
        "bare": "messages",
    }.items():
        error = results[name].error.error
        assert results[name].type == "errored" and error.type == "invalid_request_error"
        assert says in error.message, error.message
    assert results["another"].error.error.type == "not_found_error"
    assert {*stage.scheduler.classes} == {"batch"}
    # Of both its files the one with requests is gone.
    sizes = f"{Keys(MODEL).prefix}:stored:sizes"
    async with connect(stage.settings.redis_url) as redis, asyncio.timeout(60):
        while len(await redis.hkeys(sizes)) != 2:
            await asyncio.sleep(0.02)


async def test_what_is_wrong_with_the_batch_itself_is_refused(
    stage: Stage, client: AsyncAnthropic
) -> None:
    right = request("a")
    wrong: list[tuple[Any, str]] = [
        ({}, "requests must hold at least one"),
        ({"requests": []}, "requests must hold at least one"),
        ({"requests": {}}, "requests must be a list"),
        ({"requests": [right], "window": "1h"}, "window is not a field"),
        ({"requests": [right, request("b"), right]}, r"requests\[2\].custom_id 'a' is that of"),
        ({"requests": [{**right, "custom_id": "a b"}]}, r"requests\[0\].custom_id must be 1 to 64"),
        ({"requests": [{**right, "custom_id": "a" * 65}]}, r"requests\[0\].custom_id must be"),
        ({"requests": [{"params": {}}]}, r"requests\[0\].custom_id must be"),
        ({"requests": [{"custom_id": "a"}]}, r"requests\[0\].params must be an object"),
        ({"requests": [{"custom_id": "a", "params": [1]}]}, r"requests\[0\].params must be"),
        ({"requests": [{**right, "method": "POST"}]}, r"requests\[0\].method is not a field"),
        (
            {"requests": [{"custom_id": str(n), "params": {}} for n in range(50_001)]},
            "not hold more than 50000",
        ),
    ]
    for body, says in wrong:
        with pytest.raises(anthropic.BadRequestError, match=says) as refused:
            await client.post(PATH, body=body, cast_to=object)
        error: Any = refused.value.body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.RequestTooLargeError):
        await client.messages.batches.create(requests=[request("a", system="x" * (33 << 20))])
    assert not [one async for one in client.messages.batches.list()]
    assert not stage.scheduler.played


async def test_the_gateway_that_leads_is_killed(stage: Stage, client: AsyncAnthropic) -> None:
    eos = token_id(stage.tokenizer, "<|im_end|>")
    # Each is answered by the end of its own prompt.
    stage.scheduler.answer = lambda spec: [
        [token] for token in [*decode_tokens(spec.prompt)[-8:], eos]
    ]
    names = named(80)
    alone = await client.messages.create(**request(names[3])["params"])
    steps = 0
    go_on = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 150:
            await go_on.wait()

    stage.scheduler.step = step
    async with beside(stage) as (process, http), client_of(str(http.base_url)) as at_other:
        batch = await at_other.messages.batches.create(requests=map(request, names))
        async with asyncio.timeout(60):
            while steps < 150:
                await asyncio.sleep(0.02)
        leader = await leader_of(stage, batch.id)
        process.kill()
        await process.wait()
    go_on.set()
    async with asyncio.timeout(60):
        while await leader_of(stage, batch.id) == leader:
            await asyncio.sleep(0.05)
    batch = await ended(client, batch.id)
    assert counts_of(batch) == {"succeeded": 80}
    results = await results_of(client, batch.id)
    assert [*results] == names
    texts = {name: result.message.content[0].text for name, result in results.items()}
    assert texts[names[3]] == alone.content[0].text
    assert all(name.partition("-")[2] in text for name, text in texts.items())


async def leader_of(stage: Stage, batch_id: str) -> bytes:
    async with connect(stage.settings.redis_url) as redis:
        found: Any = await redis.hget(Keys(MODEL).stored(batch_id), "leader")
        return bytes(found or b"")


async def test_a_batch_is_cancelled_at_another_gateway_and_removed(
    stage: Stage, client: AsyncAnthropic, other: Gateway
) -> None:
    go_on = hold(stage, but=2)
    async with client_of(other.url) as at_other:
        batch = await client.messages.batches.create(requests=map(request, named(70)))
        await stage.admitted(64)
        async with asyncio.timeout(60):
            while len(await kept(stage, batch.id)) < 2:
                await asyncio.sleep(0.02)
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await at_other.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.NotFoundError, match="no results yet"):
            await at_other.get(f"{PATH}/{batch.id}/results", cast_to=object)
        asked = await at_other.messages.batches.cancel(batch.id)
        assert asked.processing_status == "canceling" and asked.cancel_initiated_at is not None
        batch = await ended(at_other, batch.id)
        assert counts_of(batch) == {"succeeded": 2, "canceled": 68}
        results = await results_of(at_other, batch.id)
        assert [*results] == named(70)
        assert sum(one.type == "canceled" for one in results.values()) == 68
        again = await at_other.messages.batches.cancel(batch.id)
        assert again.processing_status == "ended"
        assert (await client.messages.batches.delete(batch.id)).type == "message_batch_deleted"
        for call in (at_other.messages.batches.retrieve, at_other.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError, match="no message batch"):
                await call(batch.id)
    go_on.set()
    async with connect(stage.settings.redis_url) as redis:
        assert int(await redis.get(f"{Keys(MODEL).prefix}:stored:total") or 0) == 0


async def kept(stage: Stage, batch_id: str) -> Any:
    async with connect(stage.settings.redis_url) as redis:
        return await redis.hkeys(f"{Keys(MODEL).stored(batch_id)}:results")


async def test_what_is_left_when_its_time_ends_has_expired(
    stage: Stage, client: AsyncAnthropic
) -> None:
    hold(stage, but=2)
    batch = await client.messages.batches.create(requests=map(request, named(5)))
    await stage.admitted(5)
    async with connect(stage.settings.redis_url) as redis:  # a day has gone by
        async with asyncio.timeout(60):
            while len(await kept(stage, batch.id)) < 2:
                await asyncio.sleep(0.02)
        await redis.hset(Keys(MODEL).stored(batch.id), "expires_ms", 1)
        await redis.hdel(Keys(MODEL).stored(batch.id), "leader")
    batch = await ended(client, batch.id)
    assert counts_of(batch) == {"succeeded": 2, "expired": 3}
    kinds = [one.type for one in (await results_of(client, batch.id)).values()]
    assert sorted(kinds) == ["expired"] * 3 + ["succeeded"] * 2


async def test_a_batch_belongs_to_its_key_and_its_api(stage: Stage, client: AsyncAnthropic) -> None:
    batch = await client.messages.batches.create(requests=[request("a")])
    await ended(client, batch.id)
    calls = ("retrieve", "cancel", "delete", "results")
    async with client_of(stage.gateway.url, "another") as another:
        for call in calls:
            with pytest.raises(anthropic.NotFoundError):
                await getattr(another.messages.batches, call)(batch.id)
        assert not (await another.messages.batches.list()).data
    bearer = AsyncAnthropic(
        base_url=stage.gateway.url, auth_token="none", http_client=client._client
    )
    assert (await bearer.messages.batches.retrieve(batch.id)).id == batch.id
    assert (await client.beta.messages.batches.retrieve(batch.id)).id == batch.id
    headers = {"x-api-key": "none"}
    for path in ("/v1/batches", "/v1/files"):
        page = (await stage.http.get(path, headers=headers)).json()
        assert page["data"] == []
    assert (await stage.http.get(f"/v1/batches/{batch.id}")).status_code == 404
    for path in (f"{PATH}/expiry", f"{PATH}/%00", f"{PATH}/{batch.id[3:]}", f"{PATH}/a/b/results"):
        reply = await stage.http.get(path, headers=headers)
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    reply = await stage.http.put(f"{PATH}/{batch.id}", headers=headers)
    assert reply.status_code == 405 and reply.json()["type"] == "error"


async def test_batches_are_listed_a_page_at_a_time_in_both_directions(
    stage: Stage, client: AsyncAnthropic
) -> None:
    made = []
    for name in named(5):
        made.append((await client.messages.batches.create(requests=[request(name)])).id)
        await ended(client, made[-1])
    newest = made[::-1]
    listed = client.messages.batches
    assert [one.id async for one in listed.list(limit=2)] == newest
    page = await listed.list(limit=2)
    assert page.has_more and [page.first_id, page.last_id] == newest[:2]
    page = await listed.list(limit=2, before_id=newest[3])
    assert page.has_more and [one.id for one in page.data] == newest[1:3]
    page = await page.get_next_page()
    assert not page.has_more and [one.id for one in page.data] == newest[:1]
    assert [one.id async for one in listed.list(limit=1, before_id=newest[3])] == newest[2::-1]
    for query in ("limit=0", "limit=1001", "after_id=none", "before_id=none"):
        reply = await stage.http.get(f"{PATH}?{query}", headers={"x-api-key": "none"})
        assert reply.status_code == 400 and query.partition("=")[0] in reply.text
    reply = await stage.http.get(f"{PATH}?before_id={made[1]}&after_id={made[2]}")
    assert reply.status_code == 400


async def test_batches_of_both_apis_are_led_side_by_side_and_outlive_redis(
    private_redis: EmbeddedRedis, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with (
        open_stage(private_redis.url, model_folder, tokenizer, APIS, QUICK) as stage,
        client_of(stage.gateway.url) as client,
    ):
        go_on = hold(stage, but=3)
        made = [
            await client.messages.batches.create(requests=map(request, named(count)))
            for count in (5, 3)
        ]
        await stage.admitted(8)
        private_redis.kill()
        private_redis.start()
        go_on.set()
        for batch, count in zip(made, (5, 3), strict=True):
            assert counts_of(await ended(client, batch.id)) == {"succeeded": count}
            assert [*await results_of(client, batch.id)] == named(count)


async def test_a_batch_waits_for_room_and_says_where_there_is_none(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"max_waiting_requests": 3, "file_store_bytes": 2 << 20}
    async with (
        open_stage(redis_url, model_folder, tokenizer, APIS, QUICK, **changes) as small,
        client_of(small.gateway.url) as client,
    ):
        batch = await client.messages.batches.create(requests=map(request, named(9)))
        assert counts_of(await ended(client, batch.id)) == {"succeeded": 9}
        large: Iterable[Any] = [request(name, system="x" * (1 << 20)) for name in named(3)]
        with pytest.raises(anthropic.RateLimitError, match="--file-store-bytes"):
            await client.messages.batches.create(requests=large)


async def test_a_batch_whose_requests_are_lost_ends_and_says_so(
    stage: Stage, client: AsyncAnthropic
) -> None:
    hold(stage)
    batch = await client.messages.batches.create(requests=map(request, named(3)))
    await stage.admitted(3)
    record = Keys(MODEL).stored(batch.id)
    async with connect(stage.settings.redis_url) as redis:
        file: Any = await redis.hget(record, "input")
        await redis.delete(Keys(MODEL).stored(file.decode()))
        await redis.hdel(record, "leader")
    batch = await ended(client, batch.id)
    assert counts_of(batch) == {"errored": 3}
    with pytest.raises(anthropic.NotFoundError, match="has no results"):
        await client.messages.batches.results(batch.id)
    assert (await client.messages.batches.delete(batch.id)).id == batch.id
