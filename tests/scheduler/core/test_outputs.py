"""What is logged of several choices, of log-probabilities and of best_of, with a simulated decoder."""

import asyncio
from typing import Any

import numpy as np
import pytest

from shared.queue.token_log import decode_tokens, stride
from tessera.common.v1 import ending_pb2
from tessera.common.v1.media_pb2 import MediaItem
from tests.support.arithmetic.model import MODEL, generate, state_after
from tests.support.queue.listening import listening
from tests.support.scheduler_bench import Bench

LENGTH = ending_pb2.FINISH_REASON_LENGTH


def pairs(records: bytes, k: int) -> list[list[tuple[int, float]]]:
    """Ids and log-probabilities of each record, the token's own first."""
    kind = [("token", "<i4"), ("pairs", [("id", "<i4"), ("logprob", "<f4")], 1 + k)]
    return [[(int(i), float(v)) for i, v in row["pairs"]] for row in np.frombuffer(records, kind)]


def logprob_of(history: list[int], place: int) -> float:
    """What the decoder says of the token at this place."""
    return MODEL.logprobs(state_after(history[:place]))[history[place]]


def expected_pairs(history: list[int], place: int, k: int) -> list[tuple[int, Any]]:
    """Ids and log-probabilities that the record of the token at this place must hold."""
    best = MODEL.top(state_after(history[:place]), k)
    entries = [(history[place], logprob_of(history, place)), *best]
    return [(token, pytest.approx(value)) for token, value in entries]


async def test_each_choice_has_its_log_and_its_ending(bench: Bench) -> None:
    decoder, _ = await bench.decoder()
    bench.scheduler()
    rids = [await bench.ask([i, 2, 3], n=3, max_tokens=6 + i) for i in range(8)]
    for i, rid in enumerate(rids):
        for c, (records, ending) in enumerate(await bench.answers(rid, 3)):
            assert decode_tokens(records) == generate([i, 2, 3], 6 + i, c)
            assert ending.reason == LENGTH
    assert await bench.queue.depth() == (0, 0)
    async with asyncio.timeout(60):
        while decoder.slots:
            await asyncio.sleep(0.01)


async def test_choices_end_on_their_own(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    stop = generate([1, 2, 3], 30, 1)[4]
    rid = await bench.ask([1, 2, 3], n=3, max_tokens=30, stop_token_ids=[stop])
    for c, (records, ending) in enumerate(await bench.answers(rid, 3)):
        expected = generate([1, 2, 3], 30, c)
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
            assert ending.stop_token_id == stop
        assert decode_tokens(records) == expected


async def test_a_cancelled_request_ends_all_its_choices(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    plain = await bench.ask([1, 2, 3], n=3, max_tokens=200)
    best = await bench.ask([1, 2, 3], n=2, best_of=4, max_tokens=200)
    while len(decoder.slots) < 7:
        await asyncio.sleep(0.01)
    for rid, n in ((plain, 3), (best, 2)):
        assert await bench.queue.cancel(rid) == "FLAGGED"
        for records, ending in await bench.answers(rid, n):
            assert ending.reason == ending_pb2.FINISH_REASON_CANCELLED
            assert rid == plain or not records
    async with asyncio.timeout(60):
        while decoder.slots:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("k", [0, 2])
async def test_log_probabilities_are_in_the_records_and_in_the_published_deltas(
    bench: Bench, k: int
) -> None:
    await bench.decoder()
    async with listening(bench.redis, bench.keys) as received:
        bench.scheduler()
        other = await bench.ask([4, 5], max_tokens=12)  # asks for none, in the same steps
        rid = await bench.ask([1, 2, 3], n=2, max_tokens=9, logprobs=k)
        answers = await bench.answers(rid, 2, stride(k))
        events = await received.ended(rid, 2)
    for c, (records, _) in enumerate(answers):
        tokens = generate([1, 2, 3], 9, c)
        assert decode_tokens(records, stride(k)) == tokens
        for i, found in enumerate(pairs(records, k)):
            assert found == expected_pairs([1, 2, 3, *tokens], 3 + i, k)
        own = [e for e in events if e.choice == c]
        assert b"".join(e.records for e in own) == records
        assert {e.stride for e in own} == {stride(k)}
    tokens, _ = await bench.answer(other)
    assert tokens == generate([4, 5], 12)


async def test_prompt_log_probabilities_come_in_pieces_before_any_output(bench: Bench) -> None:
    await bench.decoder()
    prompt = [5 + i % 90 for i in range(150)]  # three steps of 64
    async with listening(bench.redis, bench.keys) as received:
        bench.scheduler()
        await bench.answer(await bench.ask(prompt, max_tokens=2))  # fills the prefix cache
        rid = await bench.ask(prompt, n=2, max_tokens=3, prompt_logprobs=2)
        await bench.answers(rid, 2)
        events = await received.ended(rid, 2)
    log = await bench.prompt_log(rid)
    assert decode_tokens(log, stride(2)) == prompt[1:]
    for i, found in enumerate(pairs(log, 2), 1):
        assert found == expected_pairs(prompt, i, 2)
    pieces = [e for e in events if e.choice == -1]
    assert len(pieces) > 1 and events[: len(pieces)] == pieces
    assert b"".join(e.records for e in pieces) == log
    ttl = await bench.redis.ttl(bench.keys.log(rid, -1))
    assert ttl > 0
    # The prompt alone is scored, and the only token is the last.
    rid = await bench.ask(prompt, max_tokens=1, prompt_logprobs=0)
    await bench.answer(rid)
    assert decode_tokens(await bench.prompt_log(rid), stride(0)) == prompt[1:]


async def test_a_taken_over_request_goes_on_with_all_its_records(bench: Bench) -> None:
    first, stack = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    prompt = [5 + i for i in range(20)]
    plain = await bench.ask(prompt, n=3, max_tokens=60, logprobs=1, prompt_logprobs=1)
    best = await bench.ask([9, 8], n=1, best_of=2, max_tokens=60)
    while len(first.slots) < 5 or min(map(len, first.slots.values())) < 35:
        await asyncio.sleep(0.01)
    await bench.decoder()
    await stack.aclose()
    for c, (records, ending) in enumerate(await bench.answers(plain, 3, stride(1))):
        tokens = generate(prompt, 60, c)
        assert decode_tokens(records, stride(1)) == tokens and ending.reason == LENGTH
        assert [p[0][0] for p in pairs(records, 1)] == tokens
    assert decode_tokens(await bench.prompt_log(plain), stride(1)) == prompt[1:]
    ((records, _),) = await bench.answers(best, 1)
    assert decode_tokens(records) in [generate([9, 8], 60, c) for c in range(2)]


async def test_a_log_that_lost_its_end_is_written_again_with_everything(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    rid = await bench.ask([1, 2, 3], n=2, max_tokens=60, logprobs=1)
    plain = await bench.ask([4, 5, 6], max_tokens=60)
    while len(decoder.slots) < 3 or min(map(len, decoder.slots.values())) < 30:
        await asyncio.sleep(0.01)
    for key, kept in (
        (bench.keys.log(rid, 0), 7 * stride(1)),
        (bench.keys.log(rid, 1), 0),
        (bench.keys.log(plain, 0), 4),
    ):
        log: Any = await bench.redis.get(key)
        assert len(log) > kept
        await bench.redis.set(key, log[:kept])
    for c, (records, _) in enumerate(await bench.answers(rid, 2, stride(1))):
        tokens = generate([1, 2, 3], 60, c)
        assert decode_tokens(records, stride(1)) == tokens
        history = [1, 2, 3, *tokens]
        expected = [expected_pairs(history, 3 + i, 1) for i in range(len(tokens))]
        assert pairs(records, 1) == expected
    assert (await bench.answer(plain))[0] == generate([4, 5, 6], 60)


async def test_of_best_of_outputs_the_best_are_logged_at_once(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.005)
    bench.scheduler()
    rid = await bench.ask([1, 2, 3], n=2, best_of=5, max_tokens=20, logprobs=1)
    while not decoder.slots:
        await asyncio.sleep(0.005)
    found = await bench.queue.read(rid, 2)
    assert found is not None and found.records == (b"", b"")
    outputs = [generate([1, 2, 3], 20, c) for c in range(5)]
    outputs.sort(key=lambda tokens: -sum(logprob_of([1, 2, 3, *tokens], 3 + i) for i in range(20)))
    answers = await bench.answers(rid, 2, stride(1))
    assert [decode_tokens(records, stride(1)) for records, _ in answers] == outputs[:2]
    assert [p[0][0] for p in pairs(answers[0][0], 1)] == outputs[0]


async def test_an_unreadable_request_is_refused_and_others_run(bench: Bench) -> None:
    await bench.decoder()
    bad = await bench.ask([1, 2, 3], n=2, stop=[""])
    good = await bench.ask([1, 2, 3])
    bench.scheduler()
    for _, ending in await bench.answers(bad, 2):
        assert ending.failure.reason == "BAD_REQUEST"
    assert (await bench.answer(good))[0] == generate([1, 2, 3], 10)


async def test_media_of_a_later_version_end_their_request_alone(bench: Bench) -> None:
    await bench.decoder()
    item = MediaItem(digest=b"d" * 16, modality=9, offset=0, length=2, rows=2)  # type: ignore[arg-type]
    bad = await bench.ask([1, 2, 3], {"media": [item]})
    good = await bench.ask([1, 2, 3])
    bench.scheduler()
    _, ending = await bench.answer(bad)
    assert ending.failure.reason == "BAD_REQUEST" and "modality 9" in ending.failure.message
    assert (await bench.answer(good))[0] == generate([1, 2, 3], 10)


async def test_a_request_that_can_never_run_is_refused_with_a_reason(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"n": 17}, 17, "TOO_MANY_CHOICES"),
        ({"best_of": 17}, 1, "TOO_MANY_CHOICES"),
        ({"use_beam_search": True, "best_of": 17}, 1, "TOO_MANY_CHOICES"),
    ]
    for options, n, reason in cases:
        rid = await bench.ask([1, 2, 3], **options)
        for _, ending in await bench.answers(rid, n):
            assert ending.failure.reason == reason
            assert ending.failure.code == 3
    assert await bench.queue.depth() == (0, 0)
    tokens, _ = await bench.answer(await bench.ask([1, 2, 3]))
    assert tokens == generate([1, 2, 3], 10)
