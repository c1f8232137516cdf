"""Timelines in a real Redis: what several processes write of a request, when its trace is due, and what is bounded."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.errors import Unavailable
from shared.queue import Queue, connect
from shared.queue.keys import Keys, new_request_id
from shared.queue.stores.timeline_store import MOST_CHUNKS, TimelineStore, TimelineWriter
from shared.queue.token_log import encode_tokens
from shared.telemetry.timeline import Timelines
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import RequestSpec

KEYS = Keys("timelines")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    opened = connect(redis_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def rid(redis: Redis) -> str:
    """A request that is admitted."""
    name = new_request_id(KEYS.tag)
    sampling = SamplingParams(n=1, max_tokens=4)
    spec = RequestSpec(request_id=name, model="m", prompt=encode_tokens([1, 2]), sampling=sampling)
    await Queue(redis, KEYS).admit(spec, cost=6)
    return name


def writer(redis: Redis, service: str) -> tuple[Timelines, TimelineWriter]:
    timelines = Timelines(service, f"{service}-1")
    return timelines, TimelineWriter(timelines, TimelineStore(redis, KEYS))


async def chunks(redis: Redis, rid: str) -> list[dict[str, Any]]:
    kept = await TimelineStore(redis, KEYS).read(rid)
    assert kept is not None
    return [json.loads(chunk) for chunk in kept.chunks]


async def test_times_of_all_processes_are_by_the_clock_of_redis(redis: Redis, rid: str) -> None:
    gateway, gateway_writer = writer(redis, "gateway")
    scheduler, scheduler_writer = writer(redis, "scheduler")
    began = time.monotonic()
    before = await redis.time()
    gateway.span(rid, "admit", began, prompt_tokens=2)
    after = await redis.time()
    scheduler.span(rid, "queue", 1_700_000_000_000_000, 1_700_000_000_000_250, service="queue")
    await gateway_writer.flush()
    await scheduler_writer.flush()
    first, second = await chunks(redis, rid)
    assert (first["service"], first["replica"]) == ("gateway", "gateway-1")
    [[name, start, duration, attributes, service, _]] = first["spans"]
    assert (name, attributes, service) == ("admit", {"prompt_tokens": 2}, "")
    error = first["clock_error_us"] + 1
    assert start <= before[0] * 1_000_000 + before[1] + error
    assert start + duration <= after[0] * 1_000_000 + after[1] + error
    assert second["spans"] == [["queue", 1_700_000_000_000_000, 250, {}, "queue", ""]]
    kept = await TimelineStore(redis, KEYS).read(rid)
    assert kept is not None and (kept.state, kept.left_out) == ("queued", 0)


async def test_nothing_is_kept_of_requests_that_redis_does_not_know(redis: Redis) -> None:
    timelines, writing = writer(redis, "gateway")
    rid = new_request_id(KEYS.tag)
    timelines.moment(rid, "take")
    await writing.flush()
    assert await TimelineStore(redis, KEYS).read(rid) is None
    assert await redis.exists(KEYS.request(rid)) == 0


async def test_what_is_held_is_written_once_the_request_is_there(redis: Redis, rid: str) -> None:
    timelines, writing = writer(redis, "gateway")
    with timelines.held(rid):
        timelines.moment(rid, "read")
        await writing.flush()
        assert await chunks(redis, rid) == []
    await writing.flush()
    assert [span[0] for chunk in await chunks(redis, rid) for span in chunk["spans"]] == ["read"]
    with pytest.raises(ValueError), timelines.held("refused"):
        timelines.moment("refused", "read")
        raise ValueError
    assert len(timelines) == 0


async def test_what_cannot_be_written_waits(redis: Redis, rid: str) -> None:
    timelines, writing = writer(redis, "scheduler")
    await writing.flush()  # the clock is known
    away = TimelineStore(connect("redis://127.0.0.1:1/0"), KEYS)
    timelines.moment(rid, "take")
    store, writing._store = writing._store, away
    with pytest.raises(Unavailable):
        await writing.flush()
    writing._store = store
    await writing.flush()
    assert [span[0] for chunk in await chunks(redis, rid) for span in chunk["spans"]] == ["take"]


async def test_a_writer_writes_by_itself_and_at_its_end(redis: Redis, rid: str) -> None:
    timelines, writing = writer(redis, "gateway")
    async with writing:
        timelines.moment(rid, "read")
        async with asyncio.timeout(30):
            while not await chunks(redis, rid):
                await asyncio.sleep(0.05)
        timelines.moment(rid, "end")
    assert len(await chunks(redis, rid)) == 2


async def test_a_request_has_so_many_events_and_chunks(redis: Redis, rid: str) -> None:
    timelines, writing = writer(redis, "scheduler")
    for _ in range(250):
        timelines.moment(rid, "preempted")
    await writing.flush()
    [chunk] = await chunks(redis, rid)
    assert (len(chunk["spans"]), chunk["left_out"]) == (200, 50)
    store = TimelineStore(redis, KEYS)
    await store.add([(rid, b"{}", -1)] * (MOST_CHUNKS + 4))
    kept = await store.read(rid)
    assert kept is not None
    assert (len(kept.chunks), kept.left_out) == (MOST_CHUNKS, 5)


async def test_a_trace_is_due_once_at_the_earliest_time(redis: Redis, rid: str) -> None:
    store = TimelineStore(redis, KEYS)
    await store.add([(rid, b"{}", 60_000)])
    assert await store.due_traces(8) == []
    await store.add([(rid, b"{}", 0)])
    await store.add([(rid, b"{}", 60_000)])
    found = await asyncio.gather(*(store.due_traces(8) for _ in range(4)))
    assert sorted(found) == [[], [], [], [rid]]
    await store.add([(rid, b"{}", 0)])
    assert await store.due_traces(8) == []
