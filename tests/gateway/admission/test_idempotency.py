"""One Idempotency-Key is one request: run once, answered as often as it is asked for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from services.gateway.gateway import open_gateway
from shared.errors import Conflict
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.queue import Lifetimes, Queue, connect
from shared.queue.keys import Keys
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import ANSWER, MODEL, Stage, until_ready
from tests.support.network.http import plain_client
from tests.support.network.sse import event_ids, events, merged, texts_of, with_ids

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "What is there?"}]}
KEY = {"Idempotency-Key": "once"}


@pytest.fixture
async def other(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a second gateway on the same Redis."""
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2})
    async with (
        open_gateway(settings) as gateway,
        plain_client(gateway.url, timeout=60) as client,
    ):
        await until_ready(client)
        yield client


async def test_a_request_that_comes_again_while_it_is_prepared_runs_once(
    stage: Stage, other: httpx.AsyncClient
) -> None:
    stage.preprocess.gate.clear()
    first = asyncio.create_task(stage.http.post(CHAT, json=BODY, headers=KEY))
    async with asyncio.timeout(60):
        while not stage.preprocess.seen:
            await asyncio.sleep(0.01)
    again = asyncio.create_task(other.post(CHAT, json={**BODY, "stream": True}, headers=KEY))
    await asyncio.sleep(0.15)
    stage.preprocess.gate.set()
    one, two = await first, await again
    assert one.json()["choices"][0]["message"]["content"] == ANSWER
    assert texts_of(events(two.text)) == {0: ANSWER}
    assert one.headers["x-request-id"] == two.headers["x-request-id"]
    assert len(stage.scheduler.played) == 1 == len(stage.preprocess.seen)
    page = (await other.get("/metrics")).text
    assert 'tessera_idempotent_hits_total{engine="0",model_name="tiny-vl"} 1.0' in page


async def test_an_ended_request_is_answered_again_whole_or_as_a_stream(
    stage: Stage, other: httpx.AsyncClient
) -> None:
    body = {**BODY, "n": 2, "logprobs": True, "return_token_ids": True, "seed": 3}
    one = await stage.http.post(CHAT, json=body, headers=KEY)
    again = await other.post(CHAT, json=body, headers=KEY)
    assert again.json() == one.json()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await other.post(CHAT, json={**body, **usage}, headers=KEY)
    chunks = events(stream.text)
    assert chunks[-1]["usage"] == one.json()["usage"]
    assert texts_of(chunks) == texts_of([{"choices": [
        {"index": c["index"], "text": c["message"]["content"]} for c in one.json()["choices"]
    ]}])  # fmt: skip
    assert len(stage.scheduler.played) == 1


async def test_a_stream_goes_on_by_its_key_and_last_event_id(
    stage: Stage, other: httpx.AsyncClient
) -> None:
    pairs = with_ids((await stage.http.post(CHAT, json=BODY | {"stream": True}, headers=KEY)).text)
    last = KEY | {"Last-Event-ID": pairs[5][0]}
    rest = await other.post(CHAT, json=BODY | {"stream": True}, headers=last)
    assert merged(events(rest.text)) == merged([chunk for _, chunk in pairs[6:]])
    for headers, status, param in (
        ({"Last-Event-ID": pairs[5][0]}, 400, "Last-Event-ID"),
        (KEY | {"Last-Event-ID": "17"}, 400, "Last-Event-ID"),
        ({"Idempotency-Key": "new", "Last-Event-ID": pairs[5][0]}, 404, "Last-Event-ID"),
    ):
        reply = await other.post(CHAT, json=BODY | {"stream": True}, headers=headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    whole = await other.post(CHAT, json=BODY, headers=last)
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert len(stage.scheduler.played) == 1
    async with asyncio.timeout(60):  # the refused one gives its place and its key back
        while await stage.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)


async def test_a_key_with_another_body_is_a_conflict(stage: Stage) -> None:
    await stage.http.post(CHAT, json=BODY, headers=KEY)
    for change in ({"temperature": 0.5}, {"messages": [{"role": "user", "content": "else"}]}):
        reply = await stage.http.post(CHAT, json=BODY | change, headers=KEY)
        assert reply.status_code == 409
        assert reply.json()["error"]["code"] == "idempotency_key_reused"
    other_route = await stage.http.post("/v1/completions", json={"prompt": "x"}, headers=KEY)
    assert other_route.status_code == 409
    too_long = await stage.http.post(CHAT, json=BODY, headers={"Idempotency-Key": "k" * 256})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_keys_of_two_tenants_are_two_keys(stage: Stage) -> None:
    one = await stage.http.post(CHAT, json=BODY | {"user": "ada"}, headers=KEY)
    two = await stage.http.post(CHAT, json=BODY | {"user": "bob"}, headers=KEY)
    assert one.headers["x-request-id"] != two.headers["x-request-id"]


async def test_a_refused_request_frees_its_key(stage: Stage) -> None:
    reply = await stage.http.post(CHAT, json=BODY | {"max_tokens": 511}, headers=KEY)
    assert reply.status_code == 400
    await stage.gateway.admission.settled()
    reply = await stage.http.post(CHAT, json=BODY, headers=KEY)
    assert reply.status_code == 200


async def test_a_retry_that_waits_for_a_dead_gateway_runs_the_request_itself(
    stage: Stage, other: httpx.AsyncClient
) -> None:
    # What is left of a gateway that died while it prepared: a reservation.
    probe = await stage.http.post(CHAT, json=BODY, headers={"Idempotency-Key": "probe"})
    (known,) = [spec.spec for spec in stage.scheduler.played.values()]
    async with connect(stage.settings.redis_url) as redis:
        await Queue(redis, Keys(MODEL), Lifetimes(reservation_ms=700)).reserve(
            known.request_id[:-4] + "dead", cost=9, max_requests=9, max_tokens=9999,
            tenant=known.tenant, idempotency_key="once", fingerprint=known.fingerprint,
        )  # fmt: skip
    reply = await other.post(CHAT, json=BODY, headers=KEY)
    assert reply.json()["choices"] == probe.json()["choices"]
    assert len(stage.scheduler.played) == 2
    assert reply.headers["x-request-id"] in stage.scheduler.played


async def test_several_prompts_are_one_request_under_one_key(
    stage: Stage, other: httpx.AsyncClient
) -> None:
    body = {"prompt": ["one", "two", "three"], "n": 2}
    one = await stage.http.post("/v1/completions", json=body, headers=KEY)
    two = await other.post("/v1/completions", json=body, headers=KEY)
    assert one.json() == two.json() and len(stage.scheduler.played) == 3
    stream = await other.post("/v1/completions", json=body | {"stream": True}, headers=KEY)
    assert texts_of(events(stream.text)) == dict.fromkeys(range(6), ANSWER)
    last = KEY | {"Last-Event-ID": event_ids(stream.text)[0]}
    reply = await other.post("/v1/completions", json=body | {"stream": True}, headers=last)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_retries_of_the_openai_client_can_carry_a_key(
    stage: Stage, other: httpx.AsyncClient
) -> None:
    stage.http.headers["Authorization"] = "Bearer none"
    first = (await stage.http.post(CHAT, json=BODY | {"model": "tiny-vl"}, headers=KEY)).json()
    async with AsyncOpenAI(base_url=f"{other.base_url}/v1", api_key="none") as client:
        again = await client.chat.completions.create(
            model="tiny-vl", messages=BODY["messages"], extra_headers=KEY
        )
    assert again.id == first["id"] and again.created == first["created"]


async def test_grpc_reads_the_key_from_its_metadata(stage: Stage) -> None:
    message = ChatMessage(role="user", content=[ContentPart(text="hello")])
    picture = ContentPart(image=b"x" * 9000)
    request = ChatRequest(messages=[message, ChatMessage(role="user", content=[picture])])
    metadata = (("idempotency-key", "once"),)
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = ChatServiceStub(channel)
        one = [event async for event in stub.Chat(request, metadata=metadata)]
        two = [event async for event in stub.Chat(request, metadata=metadata)]
        assert one[0].accepted.request_id == two[0].accepted.request_id
        last = (*metadata, ("last-event-id", one[4].event_id))
        rest = [event async for event in stub.Chat(request, metadata=last)]
        assert "".join(e.delta.text for e in rest) == "".join(e.delta.text for e in one[5:])
        request.messages[1].content[0].image = b"y" * 9000
        with pytest.raises(Conflict), calling("gateway"):
            await stub.Chat(request, metadata=metadata).read()
    assert len(stage.scheduler.played) == 1
