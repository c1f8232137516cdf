"""Refusals and failures over REST: status, OpenAI's JSON, headers, and who else is hurt (nobody)."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from services.gateway.timings import Timings
from shared.errors import Internal, InvalidRequest, Precondition
from shared.queue import connect
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage

MESSAGES: Any = [{"role": "user", "content": "hello"}]


def error_of(reply: Any) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("r_")
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


async def test_a_bad_value_is_a_400_that_names_its_field(stage: Stage) -> None:
    reply = await stage.http.post(
        "/v1/chat/completions",
        content=b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["param"] == "temperature"
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_type" or error["code"] == "invalid_value"


async def test_the_openai_client_raises_its_own_errors(stage: Stage) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await stage.openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=129)
    assert (bad.value.param, bad.value.code) == ("n", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        await stage.openai.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


WRONG_ROUTES = [
    ("GET", "/v1/nothing", 404, "no_such_route"),
    ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ("POST", "/v1/models", 405, "method_not_allowed"),
    ("DELETE", "/health", 405, "method_not_allowed"),
]


async def test_wrong_routes_answer_in_json(stage: Stage) -> None:
    for method, path, status, code in WRONG_ROUTES:
        reply = await stage.http.request(method, path)
        assert reply.status_code == status
        assert error_of(reply)["code"] == code
        assert (status == 405) == ("allow" in reply.headers)


async def test_a_body_that_is_not_json_is_a_415(stage: Stage) -> None:
    reply = await stage.http.post("/v1/completions", data={"prompt": "x"})
    assert reply.status_code == 415
    assert error_of(reply)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate", "/generate"])
async def test_json_as_curl_sends_it_is_taken_from_programs_alone(stage: Stage, path: str) -> None:
    """`curl -d` calls every body a form; pages of other origins can send one without asking."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    body = b' {"prompt": "x"}'
    assert (await stage.http.post(path, content=body, headers=headers)).status_code == 200
    headers["origin"] = "http://example.org"
    assert (await stage.http.post(path, content=body, headers=headers)).status_code in (403, 415)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_a_413(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, declared: bool
) -> None:
    async def pieces() -> Any:
        for _ in range(8):
            yield b" " * 1000

    async with open_stage(redis_url, model_folder, tokenizer, max_body_bytes=4096) as stage:
        content = b" " * 8000 if declared else pieces()
        reply = await stage.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 413
        assert "4096" in error_of(reply)["message"]
        assert (await stage.chat()).status_code == 200


async def test_keys_are_asked_for_where_there_are_any(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="one, two") as stage:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic two"}):
            reply = await stage.http.get("/v1/models", headers=headers)
            assert reply.status_code == 401
            assert error_of(reply)["type"] == "authentication_error"
        assert (await stage.chat()).status_code == 401
        stage.http.headers["authorization"] = "Bearer two"
        reply = await stage.chat(user="ada")
        assert reply.status_code == 200
        tenant = stage.scheduler.played[reply.headers["x-request-id"]].spec.tenant
        assert tenant.startswith("k") and "two" not in tenant
        del stage.http.headers["authorization"]
        assert (await stage.http.get("/health/live")).status_code == 200


async def test_a_full_queue_is_a_429_with_the_time_to_come_back(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, max_waiting_requests=2) as stage:
        stage.scheduler.taking = False
        waiting = [asyncio.create_task(stage.chat()) for _ in range(2)]
        async with asyncio.timeout(60):
            while (await stage.scheduler.queue.depth())[0] < 2 or len(stage.preprocess.seen) < 2:
                await asyncio.sleep(0.01)
        prepared = len(stage.preprocess.seen)
        reply = await stage.chat()
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert error_of(reply)["type"] == "rate_limit_exceeded"
        assert len(stage.preprocess.seen) == prepared, "refused before any media work"
        stage.scheduler.taking = True
        assert [task.status_code for task in await asyncio.gather(*waiting)] == [200, 200]
        assert (await stage.chat()).status_code == 200


async def test_what_preprocess_refuses_names_its_field_and_leaves_nothing(stage: Stage) -> None:
    field = "messages[0].content[1].image_url"
    stage.preprocess.failure = InvalidRequest("BROKEN_IMAGE", "it is cut off", field=field)
    reply = await stage.chat()
    assert reply.status_code == 400
    assert error_of(reply)["param"] == field
    assert error_of(reply)["code"] == "broken_image"
    await stage.gateway.admission.settled()
    assert await stage.scheduler.queue.depth() == (0, 0)


async def test_a_failure_inside_preprocess_is_a_500(stage: Stage) -> None:
    stage.preprocess.failure = Internal("BOOM", "it broke")
    reply = await stage.chat()
    assert (reply.status_code, error_of(reply)["type"]) == (500, "server_error")


async def test_a_prompt_that_is_too_long_is_refused_and_leaves_nothing(stage: Stage) -> None:
    reply = await stage.chat(messages=[{"role": "user", "content": "word " * 400}])
    assert reply.status_code == 400
    reply = await stage.chat(max_tokens=511)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "context_length_exceeded")
    said = "This model's maximum context length is 512 tokens. However, you requested "
    assert error_of(reply)["message"].startswith(said)
    await stage.gateway.admission.settled()
    assert await stage.scheduler.queue.depth() == (0, 0)


@pytest.mark.parametrize("timings", [Timings(preprocess_s=0.5)])
async def test_without_preprocess_it_is_a_503(stage: Stage) -> None:
    await stage.preprocess.__aexit__(None)
    reply = await stage.chat()
    assert reply.status_code == 503
    await stage.gateway.admission.settled()
    assert await stage.scheduler.queue.depth() == (0, 0)


async def test_a_failure_before_any_token_keeps_its_status(stage: Stage) -> None:
    stage.scheduler.answer = lambda spec: []
    stage.scheduler.failure = Precondition("MEDIA_MISMATCH", "5 rows, not 4").to_failure()
    reply = await stage.chat()
    assert (reply.status_code, error_of(reply)["code"]) == (400, "media_mismatch")


async def test_a_failure_after_the_first_token_is_one_marked_event_and_the_end(
    stage: Stage,
) -> None:
    tokens = stage.tokenizer.encode("The red").ids
    stage.scheduler.answer = lambda spec: [tokens]
    stage.scheduler.failure = Internal("DECODER_LOST", "gone").to_failure()
    reply = await stage.chat(stream=True)
    data = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    assert json.loads(data[-2])["choices"][0]["delta"]["content"] == "The red"
    error = json.loads(data[-1])["error"]
    assert (error["code"], error["type"]) == ("decoder_lost", "server_error")
    stream = await stage.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in stream:
            pass


async def test_a_cancel_from_elsewhere_ends_the_reply(stage: Stage) -> None:
    stage.scheduler.taking = False
    task = asyncio.create_task(stage.chat())
    queue = stage.scheduler.queue
    async with asyncio.timeout(60):
        while not (waiting := await _waiting(stage)):
            await asyncio.sleep(0.01)
    assert await queue.cancel(waiting) == "CANCELLED"
    assert error_of(await task)["code"] == "cancelled"


async def _waiting(stage: Stage) -> str:
    redis = connect(stage.settings.redis_url)
    try:
        keys = [key async for key in redis.scan_iter("t:*:r:*")]
        return keys[0].decode().rsplit(":", 1)[1] if keys else ""
    finally:
        await redis.aclose()


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"\x00" * 70_000,
]


async def test_garbage_on_one_connection_affects_no_other(stage: Stage) -> None:
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    go = asyncio.Event()

    async def wait(rid: str, index: int) -> None:
        if index == 2:
            await go.wait()

    stage.scheduler.step = wait
    running = asyncio.create_task(stage.chat(stream=True))
    for garbage in GARBAGE:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        writer.close()
    go.set()
    assert "[DONE]" in (await running).text
    reply = await stage.chat()
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
