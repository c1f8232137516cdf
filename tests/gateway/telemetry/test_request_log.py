"""What the log says of a request: one line at its end, and its names in every line and error about it."""

import asyncio
from collections.abc import Iterator, MutableMapping
from typing import Any

import grpc
import httpx
import pytest
import structlog
from structlog.testing import LogCapture

from services.gateway.gateway import Gateway
from services.gateway.timings import Timings
from shared.errors import Internal, InvalidRequest
from shared.net.channels import open_channel
from tessera.common.v1.ending_pb2 import Ending
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import Stage

Lines = list[MutableMapping[str, Any]]

_NAME = {"x-request-id": "client-17"}
# An answer in which nothing happens is written to after this time, which finds that its client has left.
QUICK = pytest.mark.parametrize("timings", [Timings(silence_s=0.2)])


@pytest.fixture
def lines() -> Iterator[Lines]:
    """All lines, of every level, with what stands in their context."""
    before, capture = structlog.get_config(), LogCapture()
    processors: list[Any] = [structlog.contextvars.merge_contextvars, capture]
    structlog.configure(processors=processors, cache_logger_on_first_use=False)
    yield capture.entries
    structlog.configure(**before)


async def ends(lines: Lines, count: int = 1) -> Lines:
    async with asyncio.timeout(60):
        while len(found := [e for e in lines if e["event"] == "request ended"]) < count:
            await asyncio.sleep(0.02)
    return found


async def test_a_line_at_the_end_of_a_request(lines: Lines, stage: Stage) -> None:
    stage.scheduler.queued_s = 0.0
    tokens = stage.says("red")
    reply = await stage.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}], "user": "ada"},
        headers=_NAME,
    )
    (line,) = await ends(lines)
    assert line["log_level"] == "info" and line["finish"] == "stop"
    assert line["request_id"] == reply.headers["x-tessera-request-id"]
    assert line["client_request_id"] == "client-17"
    assert line["tenant"].startswith("u") and "ada" not in str(line)
    usage = reply.json()["usage"]
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == len(tokens) and line["cached_tokens"] == 0
    assert line["media"] == 0 and line["queue_s"] == 0
    assert 0 < line["prepare_s"] <= line["first_token_s"] <= line["total_s"]
    stages = [e["event"] for e in lines if e.get("client_request_id") == "client-17"]
    assert stages == ["reserved", "prepared", "admitted", "first token", "request ended"]


async def test_a_line_for_each_request_that_is_refused(lines: Lines, stage: Stage) -> None:
    url = "/v1/chat/completions"
    question = {"role": "user", "content": "SECRET-PROMPT"}
    address = {"type": "image_url", "image_url": {"url": f"https://{'h' * 4000}/a.png"}}
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"messages": [question], "temperature": 9}, "INVALID_VALUE"),
        ({"messages": [question], "model": "other"}, "MODEL_NOT_FOUND"),
        ({"messages": [question], "max_tokens": 512}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"messages": [question, {"role": "user", "content": [address]}]}, "INVALID_MEDIA"),
    ]
    for body, _ in bodies:
        assert (await stage.http.post(url, json=body, headers=_NAME)).status_code >= 400
    found = await ends(lines, len(bodies))
    assert [line["error"] for line in found] == [reason for _, reason in bodies]
    assert all(line["finish"] == "error" and line["status"] in (400, 404) for line in found)
    assert all(line["client_request_id"] == "client-17" for line in found)
    assert found[0]["field"] == "temperature"
    assert "SECRET-PROMPT" not in str(lines)


@QUICK
async def test_a_request_that_fails_on_its_way_or_is_left(lines: Lines, stage: Stage) -> None:
    stage.scheduler.failure = Internal("BAD_LUCK", "it broke").to_failure()
    stage.scheduler.answer = lambda spec: [[5]]
    assert (await stage.chat()).status_code == 500
    (line,) = await ends(lines)
    assert (line["error"], line["status"], line["finish"]) == ("BAD_LUCK", 500, "error")
    assert line["why"] == "it broke"

    stage.scheduler.failure = None

    async def stand_still(rid: str, index: int) -> None:
        await asyncio.sleep(60)

    stage.scheduler.step = stand_still
    body = {"prompt": "hello", "stream": True}
    async with stage.http.stream("POST", "/v1/completions", json=body):
        pass
    line = (await ends(lines, 2))[1]
    assert line["finish"] == "abort" and line["output_tokens"] == 0 and "first_token_s" not in line


async def test_an_unexpected_error_is_logged_with_its_path_and_request(
    lines: Lines, stage: Stage
) -> None:
    stage.preprocess.failure = KeyError("SECRET-PROMPT")
    long = {"prompt": "hello " * 4000}  # such are prepared by a call of their own
    reply = await stage.http.post("/v1/completions", json=long, headers=_NAME)
    assert reply.status_code == 500 and reply.headers["x-request-id"] == "client-17"
    assert "SECRET-PROMPT" not in reply.text
    (line,) = await ends(lines)
    assert line["error"] == "INTERNAL" and line["client_request_id"] == "client-17"


async def test_names_go_to_other_services_and_come_back(lines: Lines, stage: Stage) -> None:
    await stage.http.post("/v1/completions", json={"prompt": "hello"}, headers=_NAME)
    assert [p.client_request_id for p in stage.preprocess.seen] == ["client-17"]
    assert [p.spec.client_request_id for p in stage.scheduler.played.values()] == ["client-17"]
    bad = {"x-request-id": "no\ttabs"}
    await stage.http.post("/v1/completions", json={"prompt": "hello"}, headers=bad)
    assert stage.preprocess.seen[1].client_request_id == ""
    message = ChatMessage(role="user", content=[ContentPart(text="hello")])
    metadata = (("x-request-id", "client-18"),)
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = ChatServiceStub(channel)
        async for _ in stub.Chat(ChatRequest(messages=[message]), metadata=metadata):
            pass
        assert stage.preprocess.seen[2].client_request_id == "client-18"
        call = stub.Chat(ChatRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        trailing = dict(await call.trailing_metadata() or ())
        assert trailing["x-request-id"] == "client-18"
        assert str(trailing["tessera-request-id"]).startswith("r_")
    found = await ends(lines, 4)
    assert [line.get("client_request_id") for line in found] == [
        *("client-17", None, "client-18", "client-18"),
    ]
    assert found[3]["error"] == "NO_MESSAGES" or found[3]["status"] == 400


@QUICK
async def test_a_request_that_goes_on_elsewhere(lines: Lines, stage: Stage, other: Gateway) -> None:
    go = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        await go.wait()

    stage.scheduler.step = step
    body = {"prompt": "hello", "stream": True}
    keep = {"x-tessera-resume": "60", **_NAME}
    async with stage.http.stream("POST", "/v1/completions", json=body, headers=keep) as reply:
        rid = reply.headers["x-tessera-request-id"]
    async with asyncio.timeout(60):
        while not any(e["event"] == "client left, the request goes on" for e in lines):
            await asyncio.sleep(0.02)
    go.set()
    async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
        await client.get(f"/v1/requests/{rid}/stream")
    (line,) = await ends(lines)
    assert line["resumed"] and line["request_id"] == rid and line["finish"] == "stop"
    assert line["client_request_id"] == "client-17"


def test_what_is_said_of_a_failure_is_bounded() -> None:
    failure = InvalidRequest("X", "y" * 10_000).to_failure()
    assert Ending(failure=failure).ByteSize() < 2200
