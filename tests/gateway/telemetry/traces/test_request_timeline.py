"""Timelines by the API: who may read them, what a gateway writes, and what is made of what others have written."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.telemetry.traces.request_timeline import RequestTimeline, timeline_of
from services.gateway.telemetry.traces.sampling import sampler_of
from shared.errors import InvalidRequest
from shared.queue.stores.timeline_store import KeptTimeline
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.gateway.stage import Stage, open_stage

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01", f"00-{TRACE}-b7ad6b7169203331-00"


async def timeline(stage: Stage, rid: str, **more: Any) -> Any:
    return await stage.http.get(f"/v1/requests/{rid}/timeline", **more)


async def test_a_gateway_writes_its_part_and_any_gateway_reads_it(stage: Stage, other: Any) -> None:
    reply = await stage.chat(stream=True)
    rid = reply.headers["x-tessera-request-id"]
    found = (await timeline(stage, rid)).json()
    spans = {span["name"]: span for span in found["spans"]}
    names = ("read", "reserve", "prepare", "tokenize", "admit", "deliver", "end")
    assert [name for name in names if name not in spans] == []
    assert spans["deliver"]["attributes"]["tokens"] > 3
    assert found["started"] > 1.7e9 and found["trace_id"] == rid[-32:]
    assert all(span["start_ms"] >= 0 and span["duration_ms"] >= 0 for span in found["spans"])
    by_body = (await timeline(stage, f"chatcmpl-{rid}")).json()
    assert by_body["spans"] == found["spans"]
    elsewhere = await stage.http.get(f"{other.url}/v1/requests/{rid}/timeline")
    assert elsewhere.json()["spans"] == found["spans"]


async def test_a_timeline_is_for_whoever_may_read_the_stream(stage: Stage) -> None:
    mine = {"Authorization": "Bearer mine"}
    reply = await stage.http.post(
        "/v1/completions", json={"prompt": "one", "max_tokens": 2}, headers=mine
    )
    rid = reply.headers["x-tessera-request-id"]
    assert (await timeline(stage, rid, headers=mine)).status_code == 200
    for headers in ({}, {"Authorization": "Bearer another"}):
        refused = await timeline(stage, rid, headers=headers)
        assert refused.status_code == 404
        assert "ten minutes" in refused.json()["error"]["message"]
    assert (await timeline(stage, f"r_{rid[2:10]}_{0:032x}")).status_code == 404


async def test_keys_are_checked(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="right") as stage:
        key = {"Authorization": "Bearer right"}
        reply = await stage.http.post("/v1/completions", json={"prompt": "one"}, headers=key)
        rid = reply.headers["x-tessera-request-id"]
        assert (await timeline(stage, rid)).status_code == 401
        assert (await timeline(stage, rid, headers=key)).status_code == 200


@pytest.mark.parametrize(
    ("given", "trace"),
    [(SAMPLED, TRACE), ("00-" + "0" * 32 + "-b7ad6b7169203331-01", ""), ("nonsense", "")],
)
async def test_the_trace_is_the_clients_where_it_gave_one(
    stage: Stage, given: str, trace: str
) -> None:
    reply = await stage.http.post(
        "/v1/completions", json={"prompt": "one"}, headers={"traceparent": given}
    )
    rid = reply.headers["x-tessera-request-id"]
    found = (await timeline(stage, rid)).json()
    assert found["trace_id"] == (trace or rid[-32:])
    played = stage.scheduler.played[rid].spec
    assert played.traceparent == (given if trace else "") and not played.traced


def made(*chunks: dict[str, Any], attempts: int = 1, state: str = "ended") -> RequestTimeline:
    kept = KeptTimeline(
        head=RequestSpec(request_id="r", model="m"),
        state=state,
        arrived_ms=1_000_000,
        taken_ms=0,
        first_token_ms=0,
        ended_ms=0,
        attempts=attempts,
        chunks=tuple(json.dumps(chunk).encode() for chunk in chunks),
        left_out=0,
    )
    return timeline_of(f"r_00000000_{1:032x}", kept)


def chunk(service: str, replica: str, *spans: tuple[str, int, int, dict[str, Any]]) -> Any:
    """Spans with begin and duration in milliseconds since 1000 s."""
    rows = [
        (name, 1_000_000_000 + 1000 * start, 1000 * lasts, attributes, "", "")
        for name, start, lasts, attributes in spans
    ]
    head = {"service": service, "replica": replica, "clock_error_us": 50, "left_out": 0}
    return {**head, "spans": rows}


def test_each_moment_counts_once_for_what_the_request_waited_for() -> None:
    found = made(
        chunk("gateway", "g", ("prepare", 0, 40, {"replicas": 1}), ("deliver", 100, 120, {})),
        chunk("preprocess", "p", ("tokenize", 10, 30, {})),
        chunk("scheduler", "s", ("take", 40, 0, {"attempt": 1, "tokens": 0})),
        chunk("scheduler", "s", ("schedule", 40, 20, {}), ("encode", 45, 10, {})),
        chunk("decoder", "d", ("prefill", 60, 40, {"tokens": 9}), ("decode", 100, 100, {})),
        chunk("decoder", "d", ("preempted", 120, 30, {"swapped": True})),
        chunk("gateway", "g", ("end", 225, 0, {"finish": "stop"})),
    )
    assert found.parts == {
        "decode": 70,
        "prefill": 40,
        "tokenize": 30,
        "preempted": 30,
        "deliver": 20,
        "prepare": 10,
        "encode": 10,
        "schedule": 10,
        "other": 5,
    }
    assert found.duration_ms == 225 and found.notes == []
    assert found.largest is not None and found.largest.name == "decode"
    assert found.largest.share == pytest.approx(70 / 225, abs=1e-4)


def test_what_a_killed_scheduler_had_not_written_is_said_and_seen_by_its_tokens() -> None:
    found = made(
        chunk("scheduler", "first", ("take", 10, 0, {"attempt": 1, "tokens": 0})),
        chunk("decoder", "first", ("prefill", 10, 10, {"tokens": 3})),
        chunk("gateway", "g", ("first_token", 21, 0, {}), ("pause", 400, 2600, {})),
        chunk("scheduler", "second", ("take", 2990, 0, {"attempt": 2, "tokens": 40})),
        chunk("scheduler", "second", ("ended", 3500, 0, {})),
        chunk("gateway", "g", ("end", 3501, 0, {"finish": "stop"})),
        attempts=3,
    )
    spans = {span.name: span for span in found.spans}
    assert (spans["takeover"].start_ms, spans["takeover"].duration_ms) == (390, 2590)
    assert spans["takeover"].attributes["why"] == "its scheduler was lost"
    assert spans["decode"].attributes == {"inferred": True}
    assert (spans["decode"].start_ms, spans["decode"].end_ms) == (10, 390)
    assert any("1 of 3 takings left nothing" in note for note in found.notes)
    assert any("scheduler first was lost" in note for note in found.notes)
    assert all(f"Note: {note}." in found.text for note in found.notes)


def test_a_request_that_runs_says_so() -> None:
    found = made(chunk("gateway", "g", ("read", 0, 3, {})), attempts=0, state="queued")
    assert found.text.startswith("The request is queued and has taken 3.0 ms.")
    assert made(attempts=0).largest is None


def test_samplers_are_those_of_opentelemetry() -> None:
    rid = f"r_00000000_{'8' * 32}"
    assert sampler_of("always_on", "")(rid, NOT_SAMPLED)
    assert not sampler_of("always_off", "")(rid, SAMPLED)
    follows = sampler_of("parentbased_always_off", "")
    assert follows(rid, SAMPLED) and not follows(rid, NOT_SAMPLED) and not follows(rid, "")
    assert sampler_of("parentbased_always_on", "")(rid, "")
    half = [sampler_of("traceidratio", ratio)(rid, "") for ratio in ("0.5", "0.6")]
    assert half == [False, True]
    for name, argument in (("sometimes", ""), ("traceidratio", "2"), ("traceidratio", "x")):
        with pytest.raises(InvalidRequest):
            sampler_of(name, argument)
