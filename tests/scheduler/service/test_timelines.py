"""What a scheduler writes of requests: with decoders that run out of blocks, and with one that is lost."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.queue.stores.timeline_store import TimelineStore
from tests.support.checkpoints import make_checkpoint
from tests.support.scheduler_bench import Bench

Span = dict[str, Any]


async def spans_of(bench: Bench, rid: str) -> list[Span]:
    """All spans of a request, once its scheduler has written its end."""
    store = TimelineStore(bench.redis, bench.keys)
    async with asyncio.timeout(60):
        while True:
            kept = await store.read(rid)
            assert kept is not None
            found = [
                {
                    "name": name,
                    "start": start,
                    "end": start + duration,
                    "attributes": attributes,
                    "replica": replica,
                }
                for chunk in map(json.loads, kept.chunks)
                for name, start, duration, attributes, _, replica in chunk["spans"]
            ]
            if any(span["name"] == "ended" for span in found):
                return sorted(found, key=lambda span: span["start"])
            await asyncio.sleep(0.1)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span["name"] == name]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preemptions_are_in_the_timeline(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory, short_tmp: Path, mode: str
) -> None:
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    sizes: dict[str, Any] = {
        "kv_cache_memory_bytes": 96 << 10,
        "num_host_blocks": 64,
        "max_model_len": 96,
    }
    await bench.real_decoder(folder, short_tmp / "d", **sizes)
    bench.scheduler(preemption_mode=mode)
    prompts = [np.random.default_rng(i).integers(0, 400, 3 + 11 * i).tolist() for i in range(4)]
    rids = [await bench.ask(prompt, max_tokens=40, n=2) for prompt in prompts]
    preemptions: list[Span] = []
    for rid, prompt in zip(rids, prompts, strict=True):
        answers = await bench.answers(rid, 2)
        spans = await spans_of(bench, rid)
        found = named(spans, "preempted")
        told = max(ending.preemptions for _, ending in answers)
        assert len(found) == told, "one for each that the ending counts"
        preemptions += found
        [decode] = named(spans, "decode")
        assert decode["attributes"]["tokens"] == 80
        assert all(decode["start"] <= span["start"] <= decode["end"] for span in found)
        [first] = named(spans, "first_token")
        before = [s for s in named(spans, "prefill") if s["end"] <= first["start"]]
        assert sum(span["attributes"]["tokens"] for span in before) == len(prompt)
        again = [s for s in named(spans, "prefill") if s["attributes"]["recomputed"]]
        assert not again or any(not span["attributes"]["swapped"] for span in found)
    assert preemptions
    if mode == "recompute":
        assert not any(span["attributes"]["swapped"] for span in preemptions)
    else:
        assert any(span["attributes"]["swapped"] for span in preemptions)


async def test_a_long_prompt_has_a_span_for_each_chunk(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    prompt = [1 + number % 7 for number in range(90)]
    rid = await bench.ask(prompt, max_tokens=3)
    [(_, ending)] = await bench.answers(rid, 1)
    spans = await spans_of(bench, rid)
    chunks = named(spans, "prefill")
    assert len(chunks) > 1 and sum(s["attributes"]["tokens"] for s in chunks) == len(prompt)
    starts = [span["attributes"]["start"] for span in chunks]
    assert starts == sorted(starts) and starts[0] == 0
    [queue], [schedule] = named(spans, "queue"), named(spans, "schedule")
    assert queue["end"] <= schedule["end"] <= chunks[0]["start"] + 1
    assert [span["attributes"]["of"] for span in named(spans, "log")] == ["first_token", "end"]
    assert ending.reason


async def test_the_loss_of_a_decoder_ends_what_it_did(bench: Bench) -> None:
    lost, stack = await bench.decoder(0.05)
    bench.scheduler()
    rid = await bench.ask([1, 2, 3], max_tokens=40)
    async with asyncio.timeout(60):
        while not await bench.redis.strlen(bench.keys.log(rid, 0)):
            await asyncio.sleep(0.02)
    other, _ = await bench.decoder()
    await stack.aclose()
    await bench.answers(rid, 1)
    spans = await spans_of(bench, rid)
    first, second = named(spans, "decode")
    assert (first["replica"], second["replica"]) == (lost.id, other.id)
    assert first["attributes"]["tokens"] > 0
    assert first["attributes"]["tokens"] + second["attributes"]["tokens"] <= 41
    takes = named(spans, "take")
    assert [take["attributes"]["attempt"] for take in takes] == [1, 2]
    [left] = named(spans, "left_decoder")
    assert left["attributes"]["decoder"] == lost.id and "lost" in left["attributes"]["why"]
    assert len(named(spans, "go_on")) == 1 and len(named(spans, "given_back")) == 1
