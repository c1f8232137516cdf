"""Several preprocess replicas behind one gateway."""

import asyncio

from support.gateway_stage import MODEL, Stage
from support.neighbours import PreprocessPlayer


async def both_known(stage: Stage, second: PreprocessPlayer) -> None:
    """Asks until the gateway has found the second one; what was seen till then is forgotten."""
    async with asyncio.timeout(30):
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


async def test_the_replica_with_the_least_in_hand_is_asked(stage: Stage, redis_url: str) -> None:
    async with PreprocessPlayer(redis_url, MODEL, stage.tokenizer) as second:
        await both_known(stage, second)
        second.gate.clear()
        stuck = [asyncio.create_task(stage.chat()) for _ in range(2)]
        async with asyncio.timeout(30):
            while not second.seen:
                await asyncio.sleep(0.01)
        for _ in range(4):
            assert (await asyncio.wait_for(stage.chat(), 30)).status_code == 200
        second.gate.set()
        assert [reply.status_code for reply in await asyncio.gather(*stuck)] == [200, 200]
