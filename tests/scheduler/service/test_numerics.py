"""Decoders that round otherwise: answers keep to those that began them, and say so where they could not."""

from dataclasses import replace

import pytest

from services.scheduler.output.request import Request
from shared.block_hash import root_name
from shared.queue import TakenRequest
from shared.queue.log_event import Origin
from shared.queue.token_log import encode_tokens
from shared.text.text_fold import TokenBytes
from tessera.decoder.v1.decoder_pb2 import Hello
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.arithmetic.model import BLOCK_SIZE, first_state, rounding
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.scheduler_bench import Bench
from tests.support.waiting import until_async

ONE, TWO = "avx512-1", "avx2-2"
PROMPT = [1, 2, 3]


def answer_of(numerics: str, prompt: list[int], count: int) -> list[int]:
    """What decoders of these numerics say after so many tokens."""
    first = first_state(root_name(BLOCK_SIZE, "", b""))
    return rounding(numerics).generate(prompt, 0, count, stops=False, first=first)


async def begun(decoder: ArithmeticDecoder, count: int = 1) -> None:
    """Waits until it has made some tokens of so many sequences."""
    await until_async(
        lambda: len(decoder.slots) == count and min(map(len, decoder.slots.values())) > 12
    )


async def is_exact(bench: Bench, rid: str) -> bool:
    state = await bench.queue.lookup(rid, "")
    assert state is not None
    return state.is_exact


async def bound(*decoders: ArithmeticDecoder) -> None:
    await until_async(lambda: all(decoder.largest_lease for decoder in decoders))


def begins_with(tokens: list[int], numerics: str) -> int:
    """How many tokens are those of an undisturbed run there."""
    right = answer_of(numerics, PROMPT, len(tokens))
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, right, strict=True)) if a != b), len(tokens)
    )


async def test_an_answer_goes_on_where_it_rounds_alike(bench: Bench) -> None:
    lost, stack = await bench.decoder(delay_s=0.04, numerics=ONE)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=120)
    await begun(lost)
    same, _ = await bench.decoder(delay_s=0.002, numerics=ONE)
    other, _ = await bench.decoder(numerics=TWO)
    await bound(same, other)
    for i in range(4):
        await bench.ask([9, i], max_tokens=200)  # the emptiest one would be another
    await stack.aclose()
    assert (await bench.answer(rid))[0] == answer_of(ONE, PROMPT, 120)
    assert await is_exact(bench, rid)
    assert rid in same.met and rid not in other.met


async def test_where_only_others_are_left_it_goes_on_from_its_log_and_says_so(
    bench: Bench,
) -> None:
    lost, stack = await bench.decoder(delay_s=0.04, numerics=ONE)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=120)
    await begun(lost)
    assert await is_exact(bench, rid)
    other, _ = await bench.decoder(numerics=TWO)
    await bound(other)
    fresh = await bench.ask([5, 5], max_tokens=10)
    await stack.aclose()
    tokens, _ = await bench.answer(rid)
    own = begins_with(tokens, ONE)
    assert own > 0 and len(tokens) == 120
    first = first_state(root_name(BLOCK_SIZE, "", b""))
    rest = rounding(TWO).generate([*PROMPT, *tokens[:own]], 0, 120 - own, stops=False, first=first)
    assert tokens[own:] == rest
    assert not await is_exact(bench, rid)
    # What had no token yet is simply another's from the first one on.
    await bench.answer(fresh)
    assert await is_exact(bench, fresh)


async def test_what_it_was_begun_in_outlives_its_scheduler(bench: Bench) -> None:
    lost, stack = await bench.decoder(delay_s=0.04, numerics=ONE)
    _, task = bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=100) for i in range(3)]
    await begun(lost, 3)
    task.cancel()
    await stack.aclose()
    await bench.decoder(delay_s=0.002, numerics=ONE)
    bench.scheduler()
    for i, rid in enumerate(rids):
        assert (await bench.answer(rid))[0] == answer_of(ONE, [*PROMPT, i], 100)
        assert await is_exact(bench, rid)


async def test_a_draining_decoder_hands_over_where_it_rounds_alike(bench: Bench) -> None:
    leaving, _ = await bench.decoder(delay_s=0.04, numerics=ONE)
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=150) for i in range(3)]
    await begun(leaving, 3)
    other, _ = await bench.decoder(numerics=TWO)
    same, _ = await bench.decoder(delay_s=0.002, numerics=ONE)
    await bound(other, same)
    leaving.draining = True
    for i, rid in enumerate(rids):
        assert (await bench.answer(rid))[0] == answer_of(ONE, [*PROMPT, i], 150)
        assert await is_exact(bench, rid)
    assert set(rids) <= same.met and not other.met & set(rids)


async def test_with_rows_that_depend_on_neighbours_only_an_undisturbed_answer_is_exact(
    bench: Bench,
) -> None:
    lost, stack = await bench.decoder(delay_s=0.04, numerics=ONE)
    lost.row_invariant = False
    bench.scheduler()
    whole = await bench.ask([4, 4], max_tokens=20)
    await bench.answer(whole)
    assert await is_exact(bench, whole)
    rid = await bench.ask(PROMPT, max_tokens=120)
    await begun(lost)
    same, _ = await bench.decoder(delay_s=0.002, numerics=ONE)
    same.row_invariant = False
    await bound(same)
    await stack.aclose()
    await bench.answer(rid)
    assert rid in same.met and not await is_exact(bench, rid)


@pytest.mark.parametrize("row_invariant", [True, False])
async def test_what_is_preempted_is_exact_where_rows_do_not_depend_on_neighbours(
    bench: Bench, row_invariant: bool
) -> None:
    decoder, _ = await bench.decoder(numerics=ONE)
    decoder.row_invariant = row_invariant
    bench.scheduler()
    # Together they need more than the 199 blocks of 4 tokens that there are.
    rids = [await bench.ask([*PROMPT, i], max_tokens=240) for i in range(6)]
    preempted = exact = 0
    for rid in rids:
        _, ending = await bench.answer(rid)
        preempted += ending.preemptions > 0
        exact += await is_exact(bench, rid)
        if not ending.preemptions:
            assert await is_exact(bench, rid)
    assert preempted
    assert exact == (len(rids) if row_invariant else len(rids) - preempted)


async def test_a_full_decoder_is_not_waited_for(bench: Bench) -> None:
    lost, stack = await bench.decoder(delay_s=0.04, numerics=ONE)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=120)
    await begun(lost)
    full, _ = await bench.decoder(delay_s=0.02, numerics=ONE)
    await bound(full)
    for i in range(40):  # more than the slots of both
        await bench.ask([8, i], max_tokens=120)
    await until_async(lambda: len(full.slots) == 16)
    other, _ = await bench.decoder(numerics=TWO)
    await bound(other)
    await stack.aclose()
    await bench.answer(rid)
    assert rid in other.met and not await is_exact(bench, rid)


@pytest.mark.parametrize(
    ("begun_in", "encoder", "row_invariant", "exact"),
    [
        ("n1+e1", "e1", True, True),
        ("n1+e1", "e1", False, False),
        ("n2+e1", "e1", True, False),
        ("n1+e1", "e2", True, False),
        ("n1+e1~", "e1~", True, False),  # encoded again it would have other bits
        ("n1+", "", True, False),
        ("", "e1", True, False),
    ],
)
def test_with_media_an_answer_depends_on_the_encoder_too(
    begun_in: str, encoder: str, row_invariant: bool, exact: bool
) -> None:
    spec = RequestSpec(request_id="r", prompt=encode_tokens([1, 2]))
    spec.sampling.n, spec.sampling.max_tokens = 1, 8
    spec.media.add(digest=b"i" * 16, length=1, rows=1)
    table, hello = TokenBytes([b"a"], [False]), Hello(numerics="n1", row_invariant=row_invariant)
    taken = TakenRequest(spec, 0, 0, (encode_tokens([5]),), (None,), numerics=begun_in)
    request = Request(taken, table, encoder)
    request.place(hello)
    assert request.taken.is_exact, "nothing has come since"
    assert request.origin_of(encode_tokens([6])).is_exact == exact
    assert request.taken.is_exact == exact
    # Without a token it begins there.
    fresh = Request(replace(taken, logs=(b"",), numerics=""), table, encoder)
    fresh.place(hello)
    assert (fresh.taken.numerics, fresh.decoder_numerics) == ("", None)
    assert fresh.origin_of(encode_tokens([6])) == Origin("", f"n1+{encoder}")
    fresh.computes_again()
    varies = not row_invariant or not encoder or encoder.endswith("~")
    assert fresh.origin_of(encode_tokens([6])).is_exact == (not varies)
