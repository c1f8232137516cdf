"""SIGTERM: not ready, nobody new, open answers run on for a while."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
from support.gateway_stage import MODEL, Stage, until_ready

from services.gateway.gateway import open_gateway
from shared.keys import Keys
from shared.queue import connect
from shared.registry import Directory

BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True}


def pause_at(stage: Stage, step: int) -> asyncio.Event:
    """Lets every answer wait before one step until the event is set."""
    go = asyncio.Event()

    async def wait(rid: str, index: int) -> None:
        if index == step:
            await go.wait()

    stage.scheduler.step = wait
    return go


async def test_what_outlasts_the_timeout_ends_with_a_marked_error(stage: Stage) -> None:
    pause_at(stage, 2)
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.5})
    async with httpx.AsyncClient(timeout=20) as client:
        async with open_gateway(settings) as gateway:
            await until_ready_at(client, gateway.url)
            url = f"{gateway.url}/v1/chat/completions"
            reading = asyncio.create_task(client.post(url, json=BODY))
            played = await stage.scheduler.taken()
        reply = await reading
    assert '"code": "shutting_down"' in reply.text.split("\n\n")[-2]
    assert "[DONE]" not in reply.text
    redis = connect(stage.settings.redis_url)
    flag = await redis.hget(Keys(MODEL).request(played.spec.request_id), "cancel")  # type: ignore[misc]
    assert flag == b"0", "other gateways go on with it"
    await redis.aclose()


async def until_ready_at(client: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(10):
        while (await client.get(f"{url}/health/ready")).status_code != 200:
            await asyncio.sleep(0.02)


@pytest.fixture
async def process(redis_url: str, model_folder: Path) -> "asyncio.subprocess.Process":
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root}/protos"}
    flags = f"--model {model_folder} --redis-url {redis_url} --port 0 --grpc-port 0"
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *f"-m services.gateway {flags} --shutdown-timeout 10".split(),
        env=environment,
        cwd=root,
    )


async def test_sigterm_lets_open_answers_finish(
    stage: Stage, process: asyncio.subprocess.Process, redis_url: str
) -> None:
    redis = connect(redis_url)
    async with Directory(redis, Keys(MODEL), "gateway") as gateways, asyncio.timeout(30):
        while not (other := [m for m in gateways.members if m.address != stage.gateway.url]):
            await gateways.changed()
    await redis.aclose()
    go = pause_at(stage, 3)
    async with httpx.AsyncClient(base_url=other[0].address, timeout=20) as client:
        await until_ready(client)
        async with client.stream("POST", "/v1/chat/completions", json=BODY) as reply:
            lines = reply.aiter_lines()
            async for line in lines:
                if '"content":"The' in line:  # perhaps with the next token
                    break
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while await _accepts(other[0].address):
                    await asyncio.sleep(0.05)
            go.set()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
    assert await asyncio.wait_for(process.wait(), 15) == 0


async def _accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True
