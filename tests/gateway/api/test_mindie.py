"""MindIE's own interfaces: /infer whole, streamed and resumed, /v1/tokenizer, stopInfer, and what is refused."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.gateway import Gateway
from shared.queue import connect
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, event_ids, unended_events

INPUTS = "What is there?"
STOP = f"/v2/models/{MODEL}/stopInfer"


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(event["token"]["text"] for event in found)


def ids_of(found: list[dict[str, Any]]) -> list[int]:
    return [token for event in found for token in event["token"]["id"]]


async def test_infer_answers_text_parts_and_ids(stage: Stage) -> None:
    ids = stage.says(ANSWER)
    plain = await stage.http.post("/infer", json={"inputs": INPUTS})
    assert plain.json() == {"generated_text": ANSWER}
    parameters = {
        "details": True,
        "temperature": 0.5,
        "seed": 4,
        "max_new_tokens": 30,
        "priority": 2,
    }
    parts = [{"image": "/a.png"}, {"text": INPUTS}]
    reply = await stage.http.post("/infer", json={"inputs": parts, "parameters": parameters})
    details = {"finish_reason": "eos_token", "generated_tokens": len(ids), "seed": 4}
    assert reply.json() == {"generated_text": ANSWER, "details": details}
    (message,) = stage.preprocess.seen[-1].conversation.messages
    assert message.content[0].media.url == "file:///a.png"
    by_ids = await stage.http.post(
        "/infer", json={"input_id": [5, 6], "parameters": {"do_sample": False}}
    )
    spec = stage.scheduler.played[by_ids.headers["x-request-id"]].spec
    assert spec.prompt == struct.pack("<2i", 5, 6)
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0, 20)


async def test_a_window_of_tokens_is_passed_on(stage: Stage) -> None:
    body = {"inputs": INPUTS, "parameters": {"max_window_size": 300}}
    assert (await stage.http.post("/infer", json=body)).status_code == 200
    assert stage.preprocess.seen[-1].max_window_size == 300
    assert (await stage.chat(max_window_size=301)).status_code == 200
    assert stage.preprocess.seen[-1].max_window_size == 301
    body["parameters"] = {"max_window_size": -300}
    refused = await stage.http.post("/infer", json=body)
    assert refused.status_code == 400 and "parameters.max_window_size" in refused.json()["error"]


async def test_the_rest_after_every_event_at_another_gateway(stage: Stage, other: Gateway) -> None:
    ids = stage.says(ANSWER)
    body = {"inputs": INPUTS, "stream": True, "parameters": {"details": True}}
    reply = await stage.http.post("/infer", json=body, headers=ASK_FOR_IDS)
    found, places = unended_events(reply.text), event_ids(reply.text)
    assert (text_of(found), ids_of(found)) == (ANSWER, ids)
    assert found[-1]["generated_text"] == ANSWER
    rid = reply.headers["x-request-id"]
    async with plain_client(other.url, timeout=60) as client:
        for index, place in enumerate(places[:-1], 1):
            rest = await client.get(f"/v1/requests/{rid}/stream", params={"after": place})
            again = unended_events(rest.text)
            assert text_of(again) == text_of(found[index:])
            assert ids_of(again) == ids_of(found[index:])
            assert again[-1]["generated_text"] == ANSWER
            assert again[-1]["details"] == found[-1]["details"]


async def test_tokenizer(stage: Stage) -> None:
    ids = stage.tokenizer.encode(INPUTS).ids
    reply = await stage.http.post("/v1/tokenizer", json={"inputs": INPUTS, "do_decode": False})
    assert reply.json() == {"token_number": len(ids), "tokens": ids}
    reply = await stage.http.post("/v1/tokenizer", json={"inputs": INPUTS})
    assert "".join(reply.json()["tokens"]) == INPUTS
    long = INPUTS * 6000
    for do_decode in (False, True):
        reply = await stage.http.post(
            "/v1/tokenizer", json={"inputs": long, "do_decode": do_decode}
        )
        assert "content-length" not in reply.headers, "in pieces"
        tokens = reply.json()["tokens"]
        assert reply.json()["token_number"] == len(tokens)
        assert "".join(tokens) == long if do_decode else tokens == stage.tokenizer.encode(long).ids


async def test_a_text_is_counted_as_a_body_until_it_is_tokenized(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_body_bytes": 2_000_000, "max_body_bytes_in_flight": 4_000_000}
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        stage.preprocess.gate.clear()
        body = b'{"inputs": "a"}' + b" " * 1_900_000
        calls = [
            asyncio.create_task(stage.http.post("/v1/tokenizer", content=body)) for _ in range(4)
        ]
        done, _ = await asyncio.wait(calls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        stage.preprocess.gate.set()
        assert {task.result().status_code for task in done} == {503}
        assert 200 in [(await call).status_code for call in calls]
        assert (await stage.http.post("/v1/tokenizer", content=body)).status_code == 200


async def test_stop_ends_a_request_by_the_id_in_its_body(stage: Stage, other: Gateway) -> None:
    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.1)

    stage.scheduler.step = step
    ids = stage.says(ANSWER * 20)
    assert len(ids) > 200
    path = f"/v2/models/{MODEL}/generate_stream"
    async with plain_client(other.url, timeout=60) as client:
        for name in ("mine", ""):
            body = {"id": "mine", "text_input": INPUTS, "max_tokens": 400}
            async with stage.http.stream("POST", path, json=body) as reply:
                rid = reply.headers["x-request-id"]
                if name:
                    unknown = await client.post(STOP, json={"id": name})
                    assert (unknown.status_code, unknown.json()["error_type"]) == (
                        404,
                        "NotFoundError",
                    )
                    stopped = await stage.http.post(STOP, json={"id": name})
                else:  # by the server's id, at another gateway
                    stopped = await client.post(STOP, json={"id": rid})
                assert stopped.json() == {"id": name or rid}
                text = (await reply.aread()).decode()
            assert "was cancelled" in unended_events(text)[-1]["error"]


async def test_stop_ends_all_requests_of_an_id_that_can_be_ended(stage: Stage) -> None:
    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.1)

    stage.scheduler.step = step
    stage.says(ANSWER * 20)
    body = {"id": "mine", "text_input": INPUTS, "max_tokens": 400}
    path = f"/v2/models/{MODEL}/generate_stream"
    async with (
        stage.http.stream("POST", path, json=body) as lost,
        stage.http.stream("POST", path, json=body) as reply,
        connect(stage.settings.redis_url) as redis,
    ):
        await stage.scheduler.taken(lost.headers["x-request-id"])
        for key in await redis.keys(f"*{lost.headers['x-request-id']}*"):
            await redis.delete(key)
        stopped = await stage.http.post(STOP, json={"id": "mine"})
        assert stopped.json() == {"id": "mine"}
        text = (await reply.aread()).decode()
        assert "was cancelled" in unended_events(text)[-1]["error"]


REFUSED: list[tuple[str, Any, str]] = [
    ("/infer", {}, "inputs "),
    ("/infer", {"inputs": INPUTS, "input_id": [1]}, "input_id "),
    ("/infer", {"input_id": []}, "input_id "),
    ("/infer", {"input_id": [-1]}, "input_id[0] "),
    ("/infer", {"inputs": INPUTS, "prompt": 1}, "prompt "),
    ("/infer", {"inputs": INPUTS, "parameters": {"top_q": 1}}, "parameters.top_q "),
    ("/infer", {"inputs": INPUTS, "parameters": {"top_p": 0}}, "parameters.top_p "),
    (
        "/infer",
        {"inputs": INPUTS, "parameters": {"max_new_tokens": 0}},
        "parameters.max_new_tokens ",
    ),
    ("/infer", {"inputs": INPUTS, "parameters": {"typical_p": 0.4}}, "parameters.typical_p "),
    ("/infer", {"inputs": INPUTS, "parameters": {"adapter_id": "a"}}, "parameters.adapter_id "),
    ("/v1/tokenizer", {}, "inputs "),
    (STOP, {}, "id "),
]


@pytest.mark.parametrize(("path", "body", "begins"), REFUSED, ids=str)
async def test_what_is_wrong_is_named_in_the_form_of_mindie(
    stage: Stage, path: str, body: Any, begins: str
) -> None:
    reply = await stage.http.post(path, json=body)
    content = reply.json()
    assert (reply.status_code, content["error_type"]) == (400, "Bad Request"), content
    assert content["error"].startswith(begins), content
    missing = await stage.http.get(f"{path}/nothing")
    assert missing.status_code == 404 and isinstance(missing.json()["error"], str)
