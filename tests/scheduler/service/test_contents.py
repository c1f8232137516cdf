"""Decoders whose checkpoints differ in weights alone: no answer that one has begun is continued by another."""

import asyncio
from typing import Any

from shared.block_hash import root_name
from shared.queue.token_log import decode_tokens
from tests.support.arithmetic.model import BLOCK_SIZE, MODEL, first_state
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.scheduler_bench import Bench
from tests.support.waiting import until_async

OLD, NEW = b"old weights     ", b"new weights     "
PROMPT = [1, 2, 3]


class AnotherModel(ArithmeticDecoder):
    """Its configuration is another one."""

    fingerprint = b"g" * 16


def answer_of(content: bytes, prompt: list[int], count: int) -> list[int]:
    """What decoders with these weights say."""
    first = first_state(root_name(BLOCK_SIZE, "", b"", content=content))
    return MODEL.generate(prompt, 0, count, stops=False, first=first)


async def begun(decoder: ArithmeticDecoder, count: int = 1) -> None:
    """Waits until it has logged some tokens of so many sequences."""
    await until_async(
        lambda: len(decoder.slots) == count and min(map(len, decoder.slots.values())) > 12
    )


async def content_of(bench: Bench, rid: str) -> str:
    state = await bench.queue.lookup(rid, "")
    assert state is not None
    return state.content


async def new_requests_go_to(bench: Bench, content: bytes) -> None:
    """Waits until they do, as is found out once a second."""
    async with asyncio.timeout(30):
        while await bench.redis.hget(bench.keys.meta, "content") != content.hex().encode():
            await asyncio.sleep(0.02)


async def test_new_requests_go_to_the_weights_that_came_last_and_the_others_drain(
    bench: Bench,
) -> None:
    old, _ = await bench.decoder(delay_s=0.02, content=OLD)
    bench.scheduler()
    first = [await bench.ask([*PROMPT, i], max_tokens=120) for i in range(3)]
    await begun(old, 3)
    new, new_stack = await bench.decoder(delay_s=0.005, content=NEW)
    await new_requests_go_to(bench, NEW)
    second = [await bench.ask([*PROMPT, i], max_tokens=20) for i in range(6)]
    for i, rid in enumerate(second):
        assert (await bench.answer(rid))[0] == answer_of(NEW, [*PROMPT, i], 20)
        assert await content_of(bench, rid) == NEW.hex()
    for i, rid in enumerate(first):
        assert (await bench.answer(rid))[0] == answer_of(OLD, [*PROMPT, i], 120)
        assert await content_of(bench, rid) == OLD.hex()
    assert not old.met & set(second) and not new.met & set(first)
    # Rolled back: the new ones end, and the old ones are there for everything.
    await new_stack.aclose()
    again = await bench.ask(PROMPT, max_tokens=10)
    assert (await bench.answer(again))[0] == answer_of(OLD, PROMPT, 10)


async def test_replicas_with_equal_weights_continue_each_others_answers(bench: Bench) -> None:
    lost, stack = await bench.decoder(delay_s=0.04, content=OLD)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=120)
    await begun(lost)
    other, _ = await bench.decoder(delay_s=0.002, content=OLD)
    await bench.decoder(content=NEW)
    await stack.aclose()
    assert (await bench.answer(rid))[0] == answer_of(OLD, PROMPT, 120)
    assert rid in other.met


async def test_a_draining_decoder_hands_over_to_equal_weights_alone(bench: Bench) -> None:
    leaving, _ = await bench.decoder(delay_s=0.04, content=OLD)
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=150) for i in range(3)]
    await begun(leaving, 3)
    new, _ = await bench.decoder(content=NEW)
    same, _ = await bench.decoder(delay_s=0.002, content=OLD)
    await until_async(lambda: new.largest_lease > 0 and same.largest_lease > 0)
    leaving.draining = True
    for i, rid in enumerate(rids):
        assert (await bench.answer(rid))[0] == answer_of(OLD, [*PROMPT, i], 150)
    assert set(rids) <= same.met and not new.met & set(rids)


async def test_an_answer_that_nobody_can_continue_ends_with_model_changed(bench: Bench) -> None:
    old, stack = await bench.decoder(delay_s=0.04, content=OLD)
    _, task = bench.scheduler(changed_model_timeout=1.0)
    rid = await bench.ask(PROMPT, max_tokens=200)
    await begun(old)
    new, _ = await bench.decoder(content=NEW)
    await until_async(lambda: new.largest_lease > 0)
    task.cancel()  # that the request has begun does not die with its scheduler
    await stack.aclose()
    await bench.registered(1)
    bench.scheduler(changed_model_timeout=1.0)
    tokens, ending = await bench.answer(rid)
    assert ending.failure.reason == "MODEL_CHANGED"
    assert 0 < len(tokens) < 200 and tokens == answer_of(OLD, PROMPT, len(tokens))
    assert rid not in new.met
    assert await bench.queue.depth() == (0, 0)


async def test_an_answer_waits_for_decoders_as_long_as_there_is_none_and_no_longer(
    bench: Bench,
) -> None:
    old, stack = await bench.decoder(delay_s=0.04, content=OLD)
    bench.scheduler(changed_model_timeout=0.5)
    rid = await bench.ask(PROMPT, max_tokens=100)
    fresh = await bench.ask([9, 9], max_tokens=100)
    await begun(old, 2)
    await stack.aclose()
    await asyncio.sleep(1.5)  # without any decoder, longer than it waits beside others
    back, _ = await bench.decoder(delay_s=0.002, content=OLD)
    assert (await bench.answer(rid))[0] == answer_of(OLD, PROMPT, 100)
    assert (await bench.answer(fresh))[0] == answer_of(OLD, [9, 9], 100)
    assert rid in back.met


async def test_what_has_not_begun_begins_with_the_new_weights(bench: Bench) -> None:
    old, stack = await bench.decoder(content=OLD)
    old.stalled.set()  # it has the request and logs nothing of it
    bench.scheduler(changed_model_timeout=0.0)
    rid = await bench.ask(PROMPT, max_tokens=30)
    await until_async(lambda: old.num_plans > 0)
    assert await content_of(bench, rid) == ""
    await stack.aclose()
    await bench.decoder(content=NEW)
    assert (await bench.answer(rid))[0] == answer_of(NEW, PROMPT, 30)


async def test_schedulers_take_only_what_their_decoders_can_go_on_with(bench: Bench) -> None:
    old, _ = await bench.decoder(delay_s=0.02, content=OLD)
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=100) for i in range(3)]
    await begun(old, 3)
    await bench.decoder(delay_s=0.002, content=NEW)
    bench.scheduler()
    async with asyncio.timeout(60):  # one has the old weights and the other the new ones
        while len(set((await bench.queue.leases()).values())) < 2:
            await asyncio.sleep(0.05)
    await new_requests_go_to(bench, NEW)
    rids += [await bench.ask([*PROMPT, i], max_tokens=20) for i in range(3, 9)]
    for i, rid in enumerate(rids):
        content, count = (OLD, 100) if i < 3 else (NEW, 20)
        found: Any = await bench.answers(rid, 1)
        assert decode_tokens(found[0][0]) == answer_of(content, [*PROMPT, i], count)


async def test_another_model_of_the_same_name_gets_no_requests_while_it_is_refused(
    bench: Bench,
) -> None:
    served, stack = await bench.decoder(content=OLD)
    bench.scheduler()
    await new_requests_go_to(bench, OLD)
    first = await bench.ask([*PROMPT, 0], max_tokens=10)
    assert (await bench.answer(first))[0] == answer_of(OLD, [*PROMPT, 0], 10)
    other, _ = await bench.decoder(content=NEW, of=AnotherModel)
    await until_async(lambda: other.largest_lease > 0)
    rids = [await bench.ask([*PROMPT, i], max_tokens=10) for i in range(1, 4)]
    for i, rid in enumerate(rids, 1):
        assert (await bench.answer(rid))[0] == answer_of(OLD, [*PROMPT, i], 10)
    assert served.met == {first, *rids}
    # It is the model when nothing else is served.
    await stack.aclose()
    last = await bench.ask(PROMPT, max_tokens=10)
    assert (await bench.answer(last))[0] == answer_of(NEW, PROMPT, 10)
