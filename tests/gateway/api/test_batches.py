"""Files and batches as OpenAI's client sees them: each line is answered once, whichever gateway ends."""

import asyncio
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.gateway import Gateway, open_gateway
from services.gateway.timings import Timings
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.messages import MODEL_CHANGED, QUEUE_TIMEOUT, REQUEST_TIMEOUT
from shared.queue.token_log import decode_tokens
from tessera.common.v1.ending_pb2 import Ending
from tests.fuzz import bodies
from tests.support.gateway.process import beside
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.tokenizers import token_id

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
QUICK = Timings(batch_lease_s=1.0)
OURS = {"authorization": "Bearer none"}  # the tenant of the client
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def timings() -> Timings:
    return QUICK


def line(name: Any, url: str = CHAT, /, **body: Any) -> dict[str, Any]:
    if url == COMPLETIONS:
        body = {"prompt": f"Say {name}", **body}
    elif url == RESPONSES:
        body = {"input": f"Say {name}", **body}
    else:
        body = {"messages": [{"role": "user", "content": f"Say {name}"}], **body}
    longest = "max_output_tokens" if url == RESPONSES else "max_tokens"
    body = {"model": MODEL, longest: 64, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(
        one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines
    )


async def begun(client: AsyncOpenAI, lines: Iterable[Any], **asked: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    given: Any = {"endpoint": CHAT, "completion_window": "24h", **asked}
    return await client.batches.create(input_file_id=file.id, **given)


async def ended(client: AsyncOpenAI, batch_id: str, seconds: float = 60) -> Any:
    async with asyncio.timeout(seconds):
        while (found := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.05)
    return found


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(one) for one in text.splitlines()]


def client_of(url: str, key: str = "none") -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)


def counts_of(batch: Any) -> tuple[int, int, int]:
    counts = batch.request_counts
    return counts.total, counts.completed, counts.failed


def range_of(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def said(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


async def chat(stage: Stage, name: str) -> httpx.Response:
    return await stage.http.post(CHAT, json=line(name)["body"])


def echo(stage: Stage) -> None:
    """Lets each request be answered by the end of its own prompt, a token at a time."""
    eos = token_id(stage.tokenizer, "<|im_end|>")
    stage.scheduler.answer = lambda spec: [
        [token] for token in [*decode_tokens(spec.prompt)[-8:], eos]
    ]


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


async def leader_of(stage: Stage, batch_id: str) -> bytes:
    async with connect(stage.settings.redis_url) as redis:
        found: Any = await redis.hget(Keys(MODEL).stored(batch_id), "leader")
        return bytes(found or b"")


async def test_each_endpoint_answers_as_it_does_alone(stage: Stage) -> None:
    metadata = {"of": "tests"}
    for endpoint in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        lines = [line("a", endpoint), line("b", endpoint)]
        batch = await begun(stage.openai, lines, endpoint=endpoint, metadata=metadata)
        assert (batch.endpoint, batch.metadata) == (endpoint, metadata)
        batch = await ended(stage.openai, batch.id)
        assert (batch.status, *counts_of(batch)) == ("completed", 2, 2, 0)
        assert batch.error_file_id is None and batch.errors is None
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at
        assert batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == batch.created_at + 86_400
        assert {*stage.scheduler.classes[-2:]} == {"batch"}
        results = await lines_of(stage.openai, batch.output_file_id)
        assert [one["custom_id"] for one in results] == ["a", "b"]
        alone = (await stage.http.post(endpoint, json=lines[0]["body"])).json()
        for one in results:
            response = one["response"]
            assert one["error"] is None and response["status_code"] == 200
            assert response["body"].keys() == alone.keys()
            assert ANSWER in json.dumps(response["body"], ensure_ascii=False)
    page = await stage.http.get("/metrics")
    assert 'tessera_batches_total{status="completed"} 4.0' in page.text
    assert 'tessera_batch_lines_total{result="completed"} 8.0' in page.text


async def test_lines_that_cannot_be_read_cost_themselves_alone(stage: Stage) -> None:
    lines = [
        line("good"),
        b"{no json\n",
        b"\n",
        {**line("get"), "method": "GET"},
        {**line("other"), "url": COMPLETIONS},
        line("good"),
        line(7),
        line("streams", stream=True),
        {**line("bare"), "body": []},
        line("hot", temperature=99),
        b'{"custom_id": "\xff"}\n',
        json.dumps(line("last")).encode(),
    ]
    batch = await ended(stage.openai, (await begun(stage.openai, lines)).id)
    assert (batch.status, *counts_of(batch)) == ("completed", 11, 2, 9)
    results = await lines_of(stage.openai, batch.output_file_id)
    assert [one["custom_id"] for one in results] == ["good", "last"]
    failed = await lines_of(stage.openai, batch.error_file_id)
    assert [one["custom_id"] for one in failed] == [
        None, "get", "other", "good", None, "streams", "bare", "hot", None,
    ]  # fmt: skip
    (hot,) = [one for one in failed if one["custom_id"] == "hot"]
    assert hot["response"]["status_code"] == 400 and hot["error"] is None
    assert hot["response"]["body"]["error"]["param"] == "temperature"
    refused = [one["error"] for one in failed if one["response"] is None]
    assert refused[3]["code"] == "duplicate_custom_id" and "line 6" in refused[3]["message"]
    found = {problem.line: problem for problem in batch.errors.data}
    assert sorted(found) == [2, 4, 5, 6, 7, 8, 9, 11]
    assert [found[number].param for number in (4, 5, 8, 9)] == [
        "method", "url", "body.stream", "body",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content", [b"\n \n", b"{}\n[]\n", b'{"custom_id": "a"', b"\n" * 300_000, b"{}\n" * 50_001]
)
async def test_a_file_without_a_request_fails_its_batch(stage: Stage, content: bytes) -> None:
    batch = await ended(stage.openai, (await begun(stage.openai, [content])).id)
    assert batch.status == "failed" and batch.failed_at >= batch.created_at
    assert batch.errors.data and batch.output_file_id is batch.error_file_id is None
    assert not stage.scheduler.played
    await stage.openai.files.delete(batch.input_file_id)


async def test_every_strange_line_has_one_result_and_none_is_a_fault(stage: Stage) -> None:
    draw = random.Random(3)  # some of what it draws is right
    lines = [bodies.line(draw, name) + b"\n" for name in range_of(150)]
    batch = await ended(stage.openai, (await begun(stage.openai, lines)).id)
    assert batch.status == "completed" and batch.request_counts.total == 150
    done = await lines_of(stage.openai, batch.output_file_id)
    failed = await lines_of(stage.openai, batch.error_file_id)
    assert counts_of(batch) == (150, len(done), len(failed)) and done
    numbers = sorted(int(one["id"].rpartition("_")[2]) for one in [*done, *failed])
    assert numbers == [*range(1, 151)]
    answered = [one["response"]["status_code"] for one in failed if one["response"]]
    assert set(answered) <= {400, 404, 413}


async def test_the_gateway_that_leads_is_killed(stage: Stage) -> None:
    echo(stage)
    names = [f"line {number}" for number in range(80)]
    alone = {name: said((await chat(stage, name)).json()) for name in names[:3]}
    steps = 0
    go_on = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 150:
            await go_on.wait()

    stage.scheduler.step = step
    async with beside(stage) as (process, http), client_of(str(http.base_url)) as client:
        batch = await begun(client, map(line, names))
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
    batch = await ended(stage.openai, batch.id)
    assert (batch.status, *counts_of(batch)) == ("completed", 80, 80, 0)
    results = await lines_of(stage.openai, batch.output_file_id)
    assert [one["custom_id"] for one in results] == names
    texts = {one["custom_id"]: said(one["response"]["body"]) for one in results}
    assert {name: texts[name] for name in alone} == alone
    assert all(name.split()[1] in text for name, text in texts.items())


async def test_a_batch_is_cancelled_at_another_gateway(stage: Stage, other: Gateway) -> None:
    go_on = hold(stage)
    async with client_of(other.url) as client:
        batch = await begun(stage.openai, map(line, range_of(70)))
        await stage.admitted(64)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert (batch.status, *counts_of(batch)) == ("cancelled", 70, 0, 70)
        assert batch.cancelling_at <= batch.cancelled_at and batch.output_file_id is None
        failed = await lines_of(client, batch.error_file_id)
        assert [one["custom_id"] for one in failed] == range_of(70)
        assert {one["error"]["code"] for one in failed} == {"batch_cancelled"}
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
    go_on.set()
    async with asyncio.timeout(60):
        while not all(played.cancelled for played in stage.scheduler.played.values()):
            await asyncio.sleep(0.02)
    assert len(stage.scheduler.played) <= 64


async def test_what_is_left_when_the_window_ends_has_expired(stage: Stage) -> None:
    hold(stage, but=2)
    batch = await begun(stage.openai, map(line, range_of(5)), completion_window="3s")
    with pytest.raises(openai.ConflictError, match="a batch reads"):
        await stage.openai.files.delete(batch.input_file_id)
    batch = await ended(stage.openai, batch.id)
    assert (batch.status, *counts_of(batch)) == ("expired", 5, 2, 3)
    assert batch.expired_at >= batch.expires_at
    done = await lines_of(stage.openai, batch.output_file_id)
    late = await lines_of(stage.openai, batch.error_file_id)
    assert {one["error"]["code"] for one in late} == {"batch_expired"}
    assert sorted(one["custom_id"] for one in [*done, *late]) == range_of(5)
    await stage.openai.files.delete(batch.input_file_id)


async def test_a_full_queue_is_waited_for(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"max_waiting_requests": 3}
    async with open_stage(redis_url, model_folder, tokenizer, APIS, QUICK, **changes) as small:
        batch = await ended(small.openai, (await begun(small.openai, map(line, range_of(9)))).id)
    assert (batch.status, *counts_of(batch)) == ("completed", 9, 9, 0)


async def test_others_do_not_find_them(stage: Stage) -> None:
    batch = await ended(stage.openai, (await begun(stage.openai, [line("a")])).id)
    async with client_of(stage.gateway.url, "another") as another:
        for file in (batch.input_file_id, batch.output_file_id):
            for call in (another.files.retrieve, another.files.content, another.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(file)
        for ask in (another.batches.retrieve, another.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(batch.id)
        assert not (await another.files.list()).data and not (await another.batches.list()).data
        with pytest.raises(openai.BadRequestError, match="input_file_id: there is no file"):
            await another.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/responses", completion_window="24h"
            )
    assert await lines_of(stage.openai, batch.output_file_id)


async def test_lists_are_given_a_page_at_a_time(stage: Stage) -> None:
    files, batches = [], []
    for number in range(5):
        batch = await begun(stage.openai, [line(str(number))])
        files.append(batch.input_file_id)
        batches.append((await ended(stage.openai, batch.id)).id)
    listed = [one.id async for one in stage.openai.files.list(limit=2, purpose="batch")]
    assert listed == files[::-1]
    oldest = [
        one.id async for one in stage.openai.files.list(limit=2, purpose="batch", order="asc")
    ]
    assert oldest == files
    outputs = [one async for one in stage.openai.files.list(limit=1, purpose="batch_output")]
    assert len(outputs) == 5 and {one.purpose for one in outputs} == {"batch_output"}
    assert [one.id async for one in stage.openai.batches.list(limit=2)] == batches[::-1]
    page = await stage.openai.batches.list(limit=2)
    assert page.has_more and len(page.data) == 2
    for path in ("/v1/files", "/v1/batches"):
        for query in ("limit=0", "limit=x", "after=none", "order=up"):
            reply = await stage.http.get(f"{path}?{query}", headers=OURS)
            assert (reply.status_code, reply.json()["error"]["param"]) == (
                400,
                query.partition("=")[0],
            )


async def test_what_a_batch_cannot_be_is_said(stage: Stage) -> None:
    file = (await stage.openai.files.create(file=jsonl([line("a")]), purpose="batch")).id
    right = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    wrong: list[tuple[str, Any]] = [
        ("input_file_id", "file-" + "0" * 32),
        ("input_file_id", "expiry"),
        ("input_file_id", None),
        ("endpoint", "/v1/models"),
        ("endpoint", "/v1/batches"),
        ("completion_window", "soon"),
        ("completion_window", "31d"),
        ("metadata", {"a": "b" * 513}),
        ("metadata", {str(number): "" for number in range(17)}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ]
    for name, value in wrong:
        reply = await stage.http.post("/v1/batches", json=right | {name: value}, headers=OURS)
        assert reply.status_code == 400, (name, value)
        assert reply.json()["error"]["param"].startswith(name), reply.text
    for path in ("/v1/batches/expiry", "/v1/batches/%00", "/v1/files/sizes", "/v1/files/a/content"):
        assert (await stage.http.get(path, headers=OURS)).status_code == 404


async def test_a_batch_outlives_a_restart_of_redis(
    private_redis: EmbeddedRedis, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(private_redis.url, model_folder, tokenizer, APIS, QUICK) as stage:
        go_on = hold(stage, but=3)
        batch = await begun(stage.openai, map(line, range_of(8)))
        await stage.admitted(8)
        private_redis.kill()
        private_redis.start()
        go_on.set()
        batch = await ended(stage.openai, batch.id)
        assert (batch.status, *counts_of(batch)) == ("completed", 8, 8, 0)
        results = await lines_of(stage.openai, batch.output_file_id)
        assert [one["custom_id"] for one in results] == range_of(8)
        assert (await lines_of(stage.openai, batch.input_file_id))[0]["custom_id"] == "0"


async def test_a_gateway_that_stops_hands_its_batches_over(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """Another one does not wait until its lease has run out."""
    timings = Timings(batch_lease_s=600)
    async with open_stage(redis_url, model_folder, tokenizer, APIS, timings) as stage:
        go_on = hold(stage)
        settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2})
        async with (
            open_gateway(settings, timings=timings) as first,
            client_of(first.url) as client,
        ):
            batch = await begun(client, map(line, range_of(3)))
            await stage.admitted(3)
        go_on.set()
        await begun(stage.openai, [line("a")])  # looks for batches at once
        batch = await ended(stage.openai, batch.id)
    assert (batch.status, *counts_of(batch)) == ("completed", 3, 3, 0)


@pytest.mark.parametrize(
    ("ending", "is_sent_again"),
    [(QUEUE_TIMEOUT, True), (MODEL_CHANGED, True), (REQUEST_TIMEOUT, False)],
    ids=["not begun", "other weights", "too long"],
)
async def test_what_was_lost_is_asked_for_again(
    stage: Stage, ending: Ending, is_sent_again: bool
) -> None:
    stage.scheduler.answer = lambda spec: [[5]]
    stage.scheduler.failure = ending.failure

    async def step(rid: str, index: int) -> None:
        if len(stage.scheduler.played) > 1:
            stage.scheduler.failure = None

    stage.scheduler.step = step
    batch = await ended(stage.openai, (await begun(stage.openai, [line("a")])).id)
    assert counts_of(batch) == ((1, 1, 0) if is_sent_again else (1, 0, 1))
    assert len(stage.scheduler.played) == 1 + is_sent_again
    failed = await lines_of(stage.openai, batch.error_file_id)
    assert [one["response"]["status_code"] for one in failed] == ([] if is_sent_again else [504])


async def test_characters_that_readers_take_for_ends_of_lines_divide_none(stage: Stage) -> None:
    text = "one\u2028two\u2029three\u0085four"
    stage.says(text)
    batch = await begun(stage.openai, [line("a"), line(text), line(text)])
    batch = await ended(stage.openai, batch.id)
    done = await lines_of(stage.openai, batch.output_file_id)
    assert [one["custom_id"] for one in done] == ["a", text]
    assert {said(one["response"]["body"]) for one in done} == {text}
    (refused,) = await lines_of(stage.openai, batch.error_file_id)
    assert refused["custom_id"] == text
