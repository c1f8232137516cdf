"""What ends a request early or keeps it from starting: deadlines, followers, cancels, missing embeddings."""

import asyncio
from typing import Any

from tessera.common.v1 import ending_pb2
from tessera.common.v1.media_pb2 import MediaItem
from tests.support.arithmetic.model import generate
from tests.support.scheduler_bench import Bench

PROMPT = [1, 2, 3]


async def emptied(decoder: Any) -> None:
    async with asyncio.timeout(60):
        while decoder.slots:
            await asyncio.sleep(0.01)


async def test_the_total_time_ends_a_request_that_runs(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.05)
    bench.scheduler()
    await bench.answer(await bench.ask(PROMPT, max_tokens=1))  # all is bound
    rid = await bench.ask(PROMPT, {"timeout_ms": 1500}, max_tokens=240)
    tokens, ending = await bench.answer(rid)
    assert ending.failure.reason == "REQUEST_TIMEOUT" and ending.failure.code == 4
    assert 0 < len(tokens) < 240 and tokens == generate(PROMPT, len(tokens))
    await emptied(decoder)


async def test_the_time_limit_counts_across_owners(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.05)
    stop, task = bench.scheduler()
    await bench.answer(await bench.ask(PROMPT, max_tokens=1))  # all is bound
    rid = await bench.ask(PROMPT, {"timeout_ms": 1500}, max_tokens=250)
    while rid not in decoder.met:
        await asyncio.sleep(0.01)
    stop.set()
    await task
    bench.scheduler()
    _, ending = await bench.answer(rid)
    assert ending.failure.reason == "REQUEST_TIMEOUT"
    state = await bench.queue.lookup(rid, "")
    assert state is not None and state.ended_ms - state.arrived_ms >= 1500


async def test_the_first_token_must_come_in_time(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.4)
    bench.scheduler()
    limit = {"first_token_timeout_ms": 900}
    # A prompt of many steps, and one whose first token comes in time.
    rid = await bench.ask([i % 90 + 1 for i in range(240)], limit, max_tokens=5)
    soon = await bench.ask(PROMPT, {"first_token_timeout_ms": 20_000}, max_tokens=3)
    tokens, ending = await bench.answer(rid)
    assert not tokens and ending.failure.reason == "FIRST_TOKEN_TIMEOUT"
    assert (await bench.answer(soon))[0] == generate(PROMPT, 3)
    await emptied(decoder)


async def test_a_request_without_followers_is_cancelled(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.02)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=250)
    while not decoder.slots:
        await asyncio.sleep(0.01)
    await bench.redis.hset(bench.keys.request(rid), "follow_until_ms", 1)
    # After a restart of Redis followers have time to come back.
    await bench.redis.hset(bench.keys.meta, "up_since_ms", 1)
    _, ending = await bench.answer(rid)
    assert ending.reason == ending_pb2.FINISH_REASON_CANCELLED
    await emptied(decoder)


def with_picture(number: int) -> dict[str, Any]:
    digest = number.to_bytes(16, "little")
    item = MediaItem(digest=digest, source_digest=digest * 2, offset=1, length=4, rows=4)
    return {"media": [item]}


async def test_text_is_not_stuck_behind_images_without_an_encoder(bench: Bench) -> None:
    decoder, _ = await bench.decoder()
    bench.scheduler()
    pictures = [
        await bench.ask([5, 6, 6, 6, 6, 7], with_picture(i), max_tokens=5) for i in range(80)
    ]
    for i in range(30):
        text = await bench.ask([*PROMPT, i], max_tokens=8)
        assert (await bench.answer(text))[0] == generate([*PROMPT, i], 8)
    for rid in pictures:
        await bench.queue.cancel(rid)
    for rid in pictures:
        _, ending = await bench.answer(rid)
        assert ending.reason == ending_pb2.FINISH_REASON_CANCELLED
    await emptied(decoder)


async def test_text_is_not_stuck_behind_images_that_wait_with_most_of_their_prompt(
    bench: Bench,
) -> None:
    """Running sequences, whose embeddings are missing: what they cannot compute keeps nothing else out."""
    decoder, _ = await bench.decoder(delay_s=0.2)
    bench.scheduler()
    # Then a token is known to take 3 ms or more, and what the pictures' prompts lack a second.
    await bench.answer(await bench.ask([i % 90 + 1 for i in range(240)], max_tokens=2))
    prompt = [5, 6, 6, 6, 6, *range(7, 107)]
    pictures = [await bench.ask(prompt, with_picture(i), max_tokens=5) for i in range(4)]
    async with asyncio.timeout(60):
        while len(decoder.slots) < len(pictures):
            await asyncio.sleep(0.01)
    text = await bench.ask(PROMPT, max_tokens=8)
    assert (await bench.answer(text))[0] == generate(PROMPT, 8)


async def test_only_what_can_be_begun_soon_is_taken(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.5)
    bench.scheduler()
    # Steps of 64 tokens, each half a second: about 256 tokens can be begun within two.
    await bench.answer(await bench.ask([i % 90 + 1 for i in range(240)], max_tokens=2))
    rids = [await bench.ask([i, *range(1, 100)], max_tokens=2) for i in range(12)]
    await asyncio.sleep(0.6)
    states = [await bench.queue.lookup(rid, "") for rid in rids]
    waiting = [s for s in states if s is not None and s.state == "queued"]
    assert len(waiting) >= 6, "the rest is left to others"
    assert decoder.met
