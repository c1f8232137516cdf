"""Decoders that are emptied, shared between schedulers, or lost; whoever runs a request, it loses nothing."""

import asyncio
from collections import Counter
from functools import partial

from shared.queue.token_log import stride
from tests.support.arithmetic.model import generate
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.scheduler_bench import Bench
from tests.support.waiting import until_async

PROMPT = [1, 2, 3]


def longest(decoder: ArithmeticDecoder) -> int:
    return min(map(len, decoder.slots.values()), default=0)


def is_longer(decoder: ArithmeticDecoder, tokens: int) -> bool:
    return longest(decoder) > tokens


async def held_by(bench: Bench) -> Counter[str]:
    return Counter((await bench.queue.leases()).values())


async def test_a_draining_decoder_is_emptied_onto_another(bench: Bench) -> None:
    leaving, _ = await bench.decoder(delay_s=0.03)
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=200) for i in range(6)]
    beams = await bench.ask(PROMPT, max_tokens=200, n=1, best_of=2, logprobs=0)
    await until_async(lambda: len(leaving.slots) == 8 and longest(leaving) > 20)
    leaving.delay_s = 0.05  # none of them ends before it has moved
    other, _ = await bench.decoder(delay_s=0.05)
    await until_async(lambda: other.largest_lease > 0)
    leaving.draining = True
    # Ranked outputs would begin anew: the two stay.
    await until_async(lambda: len(other.slots) == 6 and len(leaving.slots) == 2)
    leaving.delay_s = other.delay_s = 0.005
    late = await bench.ask([9, 9], max_tokens=20)
    for i, rid in enumerate(rids):
        assert (await bench.answer(rid))[0] == generate([*PROMPT, i], 200)
    assert (await bench.answer(late))[0] == generate([9, 9], 20)
    assert late not in leaving.met and beams not in other.met
    ((records, _),) = await bench.answers(beams, 1, stride(0))
    assert len(records) == 200 * stride(0)


async def test_the_last_decoder_finishes_what_it_has_and_gets_nothing_new(bench: Bench) -> None:
    leaving, _ = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    begun = await bench.ask(PROMPT, max_tokens=150)
    await until_async(lambda: longest(leaving) > 10)
    leaving.draining = True
    # Of so many plans the last was made when it had been heard.
    await until_async(lambda: leaving.plans_since_draining > 2)
    late = await bench.ask([9, 9], max_tokens=5)
    assert (await bench.answer(begun))[0] == generate(PROMPT, 150)
    state = await bench.queue.lookup(late, "")
    assert state is not None and state.state == "queued" and late not in leaving.met
    await bench.decoder()
    assert (await bench.answer(late))[0] == generate([9, 9], 5)


async def test_a_scheduler_without_a_decoder_is_given_one(bench: Bench) -> None:
    decoders = [(await bench.decoder(delay_s=0.01))[0] for _ in range(2)]
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=240) for i in range(8)]
    await until_async(lambda: sum(len(d.slots) for d in decoders) == 8)
    bench.scheduler()
    async with asyncio.timeout(60):
        while sorted((await held_by(bench)).values()) != [1, 1]:
            await asyncio.sleep(0.05)
    rids += [await bench.ask([*PROMPT, i], max_tokens=20) for i in range(8, 40)]
    for i, rid in enumerate(rids):
        tokens, _ = await bench.answer(rid)
        assert tokens == generate([*PROMPT, i], len(tokens))
    assert await bench.queue.depth() == (0, 0)
    await asyncio.sleep(2)
    assert sorted((await held_by(bench)).values()) == [1, 1], "it must not go to and fro"


async def test_a_spare_scheduler_takes_over_the_only_decoder(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    _, task = bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=200) for i in range(4)]
    await until_async(lambda: len(decoder.slots) == 4)
    bench.scheduler()
    await bench.registered(2)
    assert len(await held_by(bench)) == 1
    task.cancel()
    for i, rid in enumerate(rids):
        assert (await bench.answer(rid))[0] == generate([*PROMPT, i], 200)


async def test_requests_come_back_from_two_decoders_that_vanish(bench: Bench) -> None:
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=120, n=2) for i in range(4)]
    for _ in range(2):
        decoder, stack = await bench.decoder(delay_s=0.01)
        await until_async(partial(is_longer, decoder, 20))
        await stack.aclose()
    await bench.decoder()
    for i, rid in enumerate(rids):
        answers = await bench.answers(rid, 2)
        for choice, (records, _) in enumerate(answers):
            expected = generate([*PROMPT, i], 120, choice)
            assert records == b"".join(t.to_bytes(4, "little") for t in expected)
