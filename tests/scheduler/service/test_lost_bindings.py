"""Which losses of a decoder count against the requests that it was computing, over real connections."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from services.scheduler.decoders.process_death import has_died
from shared.net.rpc.server import RpcServer
from shared.queue.registry import Announcement, Member
from tessera.decoder.v1.decoder_pb2_grpc import add_DecoderServiceServicer_to_server
from tests.support.arithmetic.model import generate
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.scheduler_bench import Bench

PROMPT = [1, 2, 3]
SERVICE = "tessera.decoder.v1.DecoderService"
LISTENS = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(99)
"""


async def counted(bench: Bench, rid: str) -> int:
    found: Any = await bench.redis.hget(bench.keys.request(rid), "lost_decoders")
    return int(found)


async def test_a_stream_that_breaks_again_and_again_counts_nothing(bench: Bench) -> None:
    class Cut(ArithmeticDecoder):
        """Its stream breaks with the second step, and says nothing of why."""

        streams = 0

        async def Steps(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for response in super().Steps(requests, context):
                Cut.streams += response.HasField("hello")
                if response.result.step == 2:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
                yield response

    await bench.decoder(of=Cut)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=12)
    tokens, ending = await bench.answer(rid)
    assert tokens == generate(PROMPT, 12), ending
    assert Cut.streams >= 6
    assert await counted(bench, rid) == 0


async def test_a_decoder_that_ends_within_a_step_counts(bench: Bench) -> None:
    decoder, stack = await bench.decoder(delay_s=3600)
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=12)
    async with asyncio.timeout(60):
        while not decoder.num_plans:
            await asyncio.sleep(0.01)
    await stack.aclose()
    await bench.decoder()
    tokens, _ = await bench.answer(rid)
    assert tokens == generate(PROMPT, 12)
    assert await counted(bench, rid) == 1


@contextlib.asynccontextmanager
async def serving(decoder: ArithmeticDecoder, listen: str) -> AsyncIterator[str]:
    """A decoder that is not in the registry; its address."""
    async with RpcServer(listen, grace_s=0) as server:
        server.add(SERVICE, add_DecoderServiceServicer_to_server, decoder)
        await server.ready()
        yield server.address


async def died(decoder_id: str, address: str, *known: Member, answer_s: float = 1.0) -> bool:
    registry: Any = SimpleNamespace(members=known)
    return await has_died(Member(decoder_id, address), registry, "s", answer_s)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix:{}/d.sock"])
async def test_what_answers_at_its_address_says_whether_it_lives(
    listen: str, tmp_path: Any
) -> None:
    decoder, another = ArithmeticDecoder(), ArithmeticDecoder()
    async with serving(decoder, listen.format(tmp_path)) as address:
        assert not await died(decoder.id, address)
        assert decoder.largest_lease == 0
    assert await died(decoder.id, address)
    async with serving(another, address):
        assert await died(decoder.id, address)
        assert not await died(another.id, address)


async def test_a_decoder_that_has_the_place_of_a_dead_one_is_nothing_to_warn_of(
    bench: Bench,
) -> None:
    """A dead one stays in the registry for a moment, and is tried as long."""
    async with serving(ArithmeticDecoder(), "127.0.0.1:0") as address:
        with capture_logs() as lines:
            async with Announcement(bench.redis, bench.keys, "decoder", "dead", address):
                bench.scheduler()
                async with asyncio.timeout(60):
                    while not any(line.get("decoder") == "dead" for line in lines):
                        await asyncio.sleep(0.02)
    about = [line for line in lines if line.get("decoder") == "dead"]
    assert {line["event"] for line in about} == {"decoder has been started again"}
    assert {line["log_level"] for line in about} == {"debug"}


async def test_one_that_is_starting_in_its_place_is_another_one() -> None:
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:  # it loads
        assert await died("an older one", server.address)


async def test_the_registry_knows_who_has_its_place() -> None:
    address = "192.0.2.1:1"  # nobody can be asked there
    assert await died("old", address, Member("old", address), Member("new", address))


async def test_a_stopped_process_lives_until_it_is_killed() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LISTENS, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = f"127.0.0.1:{int(await process.stdout.readline())}"
    os.kill(process.pid, signal.SIGSTOP)
    finding = asyncio.create_task(died("stopped", address, answer_s=0.1))
    _, waiting = await asyncio.wait([finding], timeout=1)
    assert waiting
    process.kill()
    assert await finding
    await process.wait()
