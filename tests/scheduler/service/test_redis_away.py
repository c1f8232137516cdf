"""Redis dies and comes back, with all it had or without its last writes, while scheduler and decoders go on."""

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.net.redis.connection import connection_of
from shared.queue import Places
from tests.support.arithmetic.model import generate
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.queue.lost_tail import written
from tests.support.scheduler_bench import Bench
from tests.support.tokenizers import byte_level_tokenizer, save

PROMPT = [1, 2, 3]
LENGTH = 150


@pytest.fixture
async def bench(private_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Bench]:
    """On a Redis of its own, which writes a file."""
    save(byte_level_tokenizer(), tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(stack, private_redis.url, tmp_path)
        stack.push_async_callback(bench.redis.aclose)
        yield bench


async def generated(decoder: ArithmeticDecoder, count: int, sequences: int = 1) -> None:
    """Waits until a decoder has that many tokens of each of so many sequences."""
    async with asyncio.timeout(60):
        while (
            len(decoder.slots) < sequences
            or min(map(len, decoder.slots.values())) < len(PROMPT) + count
        ):
            await asyncio.sleep(0.005)


async def start_again(bench: Bench, server: EmbeddedRedis) -> None:
    # Without `preexec_fn`, as the fixture has it: what runs in a fork of a process with gRPC's threads may crash.
    server._process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
    async with asyncio.timeout(60):
        while not server.answers():
            await asyncio.sleep(0.01)
    connection_of(bench.redis).abort()


async def test_decoders_go_on_while_redis_is_away(
    bench: Bench, private_redis: EmbeddedRedis
) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    rids = [await bench.ask([*PROMPT, i], max_tokens=LENGTH) for i in range(4)]
    short = await bench.ask(PROMPT, max_tokens=50)
    await generated(decoder, 10, sequences=5)
    private_redis.kill()
    there = max(map(len, decoder.slots.values()))
    await generated(decoder, there + 50, sequences=4)  # and the short one has ended meanwhile
    await start_again(bench, private_redis)
    for i, rid in enumerate(rids):
        tokens, _ = await bench.answer(rid)
        assert tokens == generate([*PROMPT, i], LENGTH)
    tokens, _ = await bench.answer(short)
    assert tokens == generate(PROMPT, 50)
    assert decoder.largest_lease and await bench.queue.depth() == (0, 0)
    tokens, _ = await bench.answer(await bench.ask(PROMPT, max_tokens=5))
    assert tokens == generate(PROMPT, 5)


@pytest.mark.parametrize("lost", ["tokens", "take", "everything"])
async def test_lost_writes_of_redis_are_restored_by_the_owner(
    bench: Bench, private_redis: EmbeddedRedis, lost: str
) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    (file,) = private_redis.folder.rglob("appendonly*.aof")
    backup = private_redis.folder / "backup"
    if lost == "everything":  # all but that it ever ran
        await bench.redis.ping()
        await written(private_redis)
        shutil.copy(file, backup)
    rid, ended = [await bench.ask([*PROMPT, i], max_tokens=100 - 70 * i) for i in range(2)]
    if lost == "take":
        await written(private_redis)
        shutil.copy(file, backup)
    bench.scheduler()
    await generated(decoder, 10, sequences=2)
    if lost == "tokens":
        await written(private_redis)
        shutil.copy(file, backup)
    await bench.answer(ended)
    private_redis.kill()
    shutil.copy(backup, file)
    lease = decoder.largest_lease
    await start_again(bench, private_redis)
    async with asyncio.timeout(60):
        while await bench.queue.read(rid, 1) is None or await bench.queue.read(ended, 1) is None:
            await asyncio.sleep(0.01)
    tokens, _ = await bench.answer(rid)
    assert tokens == generate([*PROMPT, 0], 100)
    tokens, _ = await bench.answer(ended)
    assert tokens == generate([*PROMPT, 1], 30)
    assert decoder.largest_lease == lease, "it was computed once"
    async with asyncio.timeout(60):
        while await bench.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)


async def test_a_take_whose_answer_was_lost_goes_back(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    await bench.answer(await bench.ask(PROMPT))
    found: list[Any] = await bench.redis.zrange(f"{bench.keys.prefix}:scheds", 0, -1)
    (sid,) = found
    rid = ""
    while not rid:
        waiting = await bench.ask(PROMPT, max_tokens=7)
        if await bench.queue.take(sid.decode(), [Places("", 1, 1 << 30)]):
            rid = waiting
    tokens, _ = await bench.answer(rid)
    assert tokens == generate(PROMPT, 7)
