"""Several preprocess replicas behind one gateway."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.timings import Timings
from shared.errors import Unavailable
from shared.net import tasks
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.registry import Directory, Member
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tests.support.gateway.neighbours import PreprocessPlayer
from tests.support.gateway.stage import MODEL, Stage


async def both_known(stage: Stage, second: PreprocessPlayer) -> None:
    """Asks until the gateway has found the second one; what was seen till then is forgotten."""
    async with asyncio.timeout(60):
        while not second.seen:
            await stage.chat()
    second.seen.clear()
    stage.preprocess.seen.clear()


async def test_replicas_share_the_work_and_a_dead_one_is_passed_over(
    stage: Stage, redis_url: str
) -> None:
    async with PreprocessPlayer(redis_url, MODEL, stage.tokenizer) as second:
        await both_known(stage, second)
        for _ in range(6):
            assert (await stage.chat()).status_code == 200
        assert len(second.seen) == len(stage.preprocess.seen) == 3
        # It dies without leaving the registry.
        await second.server.grpc.stop(0)
        for _ in range(4):
            assert (await stage.chat()).status_code == 200
        assert len(stage.preprocess.seen) == 7


async def test_a_prompt_waits_for_the_replica_that_replaces_the_only_one(
    stage: Stage, redis_url: str
) -> None:
    assert (await stage.chat()).status_code == 200
    # It dies without leaving the registry: it is still listed for a while.
    await stage.preprocess.server.grpc.stop(0)
    waiting = [asyncio.create_task(stage.chat()) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, timeout=1)
    assert not done
    async with PreprocessPlayer(redis_url, MODEL, stage.tokenizer):
        replies = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert [reply.status_code for reply in replies] == [200] * 3


async def test_without_any_replica_the_wait_ends(redis_url: str) -> None:
    redis = connect(redis_url)
    directory = Directory(redis, Keys("m"), "preprocess")
    pool = PreprocessPool(directory, 1 << 20, Timings(preprocess_s=0.2))
    with pytest.raises(Unavailable, match="no preprocess service is running"):
        await asyncio.wait_for(pool.prepare(PrepareRequest()), 60)
    await redis.aclose()


async def test_the_replica_with_the_least_in_hand_is_asked(stage: Stage, redis_url: str) -> None:
    async with PreprocessPlayer(redis_url, MODEL, stage.tokenizer) as second:
        await both_known(stage, second)
        second.gate.clear()
        stuck = [asyncio.create_task(stage.chat()) for _ in range(2)]
        async with asyncio.timeout(60):
            while not second.seen:
                await asyncio.sleep(0.01)
        for _ in range(4):
            assert (await asyncio.wait_for(stage.chat(), 60)).status_code == 200
        second.gate.set()
        assert [reply.status_code for reply in await asyncio.gather(*stuck)] == [200, 200]


@pytest.mark.parametrize("timings", [Timings(lost_by_prompt_s=0.2)])
async def test_a_prompt_that_took_long_where_it_was_lost_is_not_sent_on(
    stage: Stage, redis_url: str
) -> None:
    async with PreprocessPlayer(redis_url, MODEL, stage.tokenizer) as second:
        await both_known(stage, second)
        second.gate.clear()
        asked = [asyncio.create_task(stage.chat()) for _ in range(2)]  # one of them goes there
        async with asyncio.timeout(60):
            while not second.seen:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await second.server.grpc.stop(0)
        statuses = sorted([reply.status_code for reply in await asyncio.gather(*asked)])
        assert statuses == [200, 503]
        assert len(stage.preprocess.seen) == 1
        second.gate.set()


@contextlib.asynccontextmanager
async def silent_peer() -> AsyncIterator[str]:
    """The address of one that takes connections and says nothing."""
    taken: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: taken.append(writer), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in taken:
            writer.transport.abort()


async def test_two_callers_find_the_same_replicas_gone(redis_url: str) -> None:
    redis, keys = connect(redis_url), Keys("m")
    directory = Directory(redis, keys, "preprocess")
    pool = PreprocessPool(directory, 1 << 20, Timings(preprocess_s=0.0))
    async with contextlib.AsyncExitStack() as stack:
        for number in range(3):
            address = await stack.enter_async_context(silent_peer())
            directory.members += (Member(f"old {number}", address),)
        # Those who asked have left; what they asked for is still under way.
        waiting = [asyncio.create_task(pool.prepare(PrepareRequest())) for _ in range(3)]
        await asyncio.wait(waiting, timeout=0.3)
        await tasks.end(*waiting)
        directory.members = tuple(Member(f"new {i}", f"127.0.0.1:{i}") for i in (4, 5, 6))
        asked = [pool.prepare(PrepareRequest()) for _ in range(3)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in failed] == [Unavailable] * 3
        await pool.close()
    await redis.aclose()
