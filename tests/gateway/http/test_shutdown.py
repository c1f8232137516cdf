"""SIGTERM: not ready, nobody new, open answers run on for a while."""

import asyncio
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from services.gateway.gateway import open_gateway, run_gateway
from shared.errors import Unavailable
from shared.queue import connect
from shared.queue.keys import Keys
from tests.support.gateway.process import beside
from tests.support.gateway.stage import MODEL, Stage, pause_at

BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True}


async def test_what_outlasts_the_timeout_ends_with_a_marked_error(stage: Stage) -> None:
    pause_at(stage, 2)
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.5})
    async with httpx.AsyncClient(timeout=60) as client:
        async with open_gateway(settings) as gateway:
            await until_ready_at(client, gateway.url)
            url = f"{gateway.url}/v1/chat/completions"
            request = client.build_request("POST", url, json=BODY)
            reply = await client.send(request, stream=True)
            parts = reply.aiter_text()
            text = await anext(parts)
            played = await stage.scheduler.taken()
            reading = asyncio.create_task(rest_of(parts))
        text += await reading
    assert '"code": "shutting_down"' in text.split("\n\n")[-2]
    assert "[DONE]" not in text
    redis = connect(stage.settings.redis_url)
    flag = await redis.hget(Keys(MODEL).request(played.spec.request_id), "cancel")
    assert flag == b"0", "other gateways go on with it"
    await redis.aclose()


async def rest_of(parts: AsyncIterator[str]) -> str:
    return "".join([part async for part in parts])


async def until_ready_at(client: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(60):
        while (await client.get(f"{url}/health/ready")).status_code != 200:
            await asyncio.sleep(0.02)


async def test_sigterm_lets_open_answers_finish(stage: Stage) -> None:
    go = pause_at(stage, 3)
    async with beside(stage, "--shutdown-timeout", "60") as (process, client):
        async with client.stream("POST", "/v1/chat/completions", json=BODY) as reply:
            lines = reply.aiter_lines()
            async for line in lines:
                if '"content":"The' in line:  # perhaps with the next token
                    break
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while await _accepts(str(client.base_url)):
                    await asyncio.sleep(0.05)
            go.set()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def _accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def test_a_rest_server_that_dies_ends_the_process_with_a_message(stage: Stage) -> None:
    before = asyncio.all_tasks()
    running = asyncio.create_task(run_gateway(stage.settings, asyncio.Event()))

    def serving() -> list[asyncio.Task[object]]:
        new = asyncio.all_tasks() - before
        return [task for task in new if " Server.serve " in repr(task.get_coro())]

    async with asyncio.timeout(60):
        while not serving():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        serving()[0].cancel()
        with pytest.raises(Unavailable, match="has stopped serving"):
            await running
