"""/v1/requests/{id}: what has become of a request, and its end."""

import asyncio
from typing import Any

import pytest

from shared.errors import Internal, NotFound
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.queue.log_event import Origin
from tessera.common.v1.ending_pb2 import FinishReason
from tessera.gateway.v1.chat_pb2 import CancelRequestRequest, GetRequestRequest
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import ANSWER, Stage


async def state_of(stage: Stage, rid: str) -> dict[str, Any]:
    reply = await stage.http.get(f"/v1/requests/{rid}")
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


async def test_the_state_of_a_request_that_completed(stage: Stage) -> None:
    tokens = stage.says(ANSWER)
    reply = await stage.chat(n=2)
    found = await state_of(stage, reply.headers["x-request-id"])
    assert (found["status"], found["object"], found["model"]) == ("completed", "request", "tiny-vl")
    assert found["usage"] == {
        name: reply.json()["usage"][name]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    assert found["choices"] == [
        {"index": index, "tokens": len(tokens), "finish_reason": "stop"} for index in range(2)
    ]
    times = found["timeline"]
    order = [times[f"{name}_ms"] for name in ("arrived", "taken", "first_token", "ended")]
    assert order == sorted(order) and order[0] > 0
    assert found["attempts"] == 1 and found["created"] == reply.json()["created"]
    assert found["exact"] is True


async def test_a_request_waits_runs_and_is_cancelled(stage: Stage) -> None:
    stage.scheduler.taking = False
    go = asyncio.Event()

    async def step(rid: str, index: int) -> None:
        if index == 2:
            await go.wait()

    stage.scheduler.step = step
    async with stage.http.stream(
        "POST", "/v1/completions", json={"prompt": "hello", "stream": True}
    ) as reply:
        rid = reply.headers["x-request-id"]
        found = await state_of(stage, rid)
        assert found["status"] == "queued" and found["attempts"] == 0
        assert found["timeline"]["taken_ms"] is None
        assert found["choices"] == [{"index": 0, "tokens": 0, "finish_reason": None}]
        stage.scheduler.taking = True
        async with asyncio.timeout(60):
            while (
                found["usage"]["completion_tokens"] < 2 or not found["timeline"]["first_token_ms"]
            ):
                found = await state_of(stage, rid)
        assert found["status"] == "running"
        cancelled = await stage.http.delete(f"/v1/requests/{rid}")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelling")
        go.set()
        text = await reply.aread()
    assert b'"code": "cancelled"' in text.split(b"\n\n")[-2]
    found = await state_of(stage, rid)
    assert found["status"] == "cancelled"
    assert found["choices"][0]["finish_reason"] == "cancelled"
    again = await stage.http.delete(f"/v1/requests/{rid}")
    assert again.json() == found, "what has ended stays as it is"


async def test_a_waiting_request_is_cancelled_there_and_then(stage: Stage) -> None:
    stage.scheduler.taking = False
    async with stage.http.stream(
        "POST", "/v1/completions", json={"prompt": "hello", "stream": True}
    ) as reply:
        rid = reply.headers["x-request-id"]
        assert (await stage.http.delete(f"/v1/requests/{rid}")).json()["status"] == "cancelled"
        assert b"cancelled" in await reply.aread()


async def test_a_failure_is_reported_with_its_reason(stage: Stage) -> None:
    stage.scheduler.failure = Internal("BAD_LUCK", "it broke").to_failure()
    stage.scheduler.answer = lambda spec: [[5]]
    reply = await stage.chat()
    found = await state_of(stage, reply.headers["x-request-id"])
    assert found["status"] == "failed"
    assert found["choices"][0]["finish_reason"] == "error"
    assert found["choices"][0]["error"]["code"] == "bad_luck"


async def test_the_same_over_grpc(stage: Stage) -> None:
    tokens = stage.says(ANSWER)
    rid = (await stage.chat()).headers["x-request-id"]
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = ChatServiceStub(channel)
        found = await stub.GetRequest(GetRequestRequest(request_id=rid))
        assert (found.request_id, found.status, found.attempts) == (rid, "completed", 1)
        assert found.choices[0].tokens == len(tokens) == found.completion_tokens
        assert found.exact
        assert found.choices[0].reason == FinishReason.FINISH_REASON_STOP
        assert 0 < found.arrived_ms <= found.taken_ms <= found.first_token_ms <= found.ended_ms
        assert await stub.CancelRequest(CancelRequestRequest(request_id=rid)) == found
        for call in (
            stub.GetRequest(GetRequestRequest(request_id=rid, user="eve")),
            stub.CancelRequest(CancelRequestRequest(request_id=rid[:-1])),
        ):
            with pytest.raises(NotFound), calling("gateway"):
                await call


async def test_an_answer_that_went_on_with_other_numerics_is_not_exact(stage: Stage) -> None:
    stage.says(ANSWER)
    stage.scheduler.origin = Origin("c0", "n1", is_exact=False)
    rid = (await stage.chat()).headers["x-request-id"]
    found = await state_of(stage, rid)
    assert (found["exact"], found["content"]) == (False, "c0")
    async with open_channel(stage.gateway.grpc_address) as channel:
        status = await ChatServiceStub(channel).GetRequest(GetRequestRequest(request_id=rid))
    assert not status.exact


async def test_other_methods_are_named(stage: Stage) -> None:
    reply = await stage.http.post("/v1/requests/r_1")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, DELETE, HEAD")
    assert (await stage.http.get("/v1/requests/r_1/else")).status_code == 404
