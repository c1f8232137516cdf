"""A gateway on real sockets, with stand-ins for the services that it calls, over the real contracts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import Tokenizer

from services.gateway.api.parts import Api
from services.gateway.apis import APIS
from services.gateway.gateway import Gateway, open_gateway
from services.gateway.settings import GatewaySettings
from services.gateway.timings import USUAL, Timings
from shared.queue import connect
from shared.queue.keys import Keys
from shared.text.text_fold import TokenBytes
from tests.support.gateway.neighbours import PreprocessPlayer, SchedulerPlayer
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS
from tests.support.tokenizers import byte_level_tokenizer, save, token_id

MODEL = "tiny-vl"
MAX_MODEL_LEN = 512
ANSWER = "The red circle 😀 stands left of the blue square. 图中有一个红色的圆形。"


@dataclass
class Stage:
    """Everything that a test talks to."""

    gateway: Gateway
    settings: GatewaySettings
    tokenizer: Tokenizer
    preprocess: PreprocessPlayer
    scheduler: SchedulerPlayer
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    def says(self, text: str, size: int = 1) -> list[int]:
        """Lets the scheduler answer every request with a text and the end-of-sequence token, `size`
        tokens a step.
        """
        eos = token_id(self.tokenizer, "<|im_end|>")
        ids: list[int] = [*self.tokenizer.encode(text).ids, eos]
        groups: list[Sequence[int]] = [ids[i : i + size] for i in range(0, len(ids), size)]
        self.scheduler.answer = lambda spec: groups
        return ids

    async def admitted(self, count: int) -> None:
        """Waits until so many requests have been admitted. A reservation alone has no hash yet."""
        keys = Keys(MODEL)
        redis = connect(self.settings.redis_url)
        async with redis, asyncio.timeout(60):
            while len(await redis.keys(f"{keys.prefix}:r:*")) < count:
                await asyncio.sleep(0.01)

    async def chat(self, *, with_ids: bool = False, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions with a short question unless `messages` says otherwise."""
        body.setdefault("messages", [{"role": "user", "content": "What is there?"}])
        headers = ASK_FOR_IDS if with_ids else None
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)


def write_model(folder: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder without tensors: what the gateway reads of one."""
    folder.mkdir()
    save(tokenizer, folder)
    size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"max_position_embeddings": MAX_MODEL_LEN, "vocab_size": size},
    }
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


class StagedModel(NamedTuple):
    """What a stage serves: its tokenizer, its folder, and what it says unless a test says otherwise."""

    tokenizer: Callable[[], Tokenizer]
    write: Callable[[Path, Tokenizer], Path]
    answer: str


PLAIN = StagedModel(byte_level_tokenizer, write_model, ANSWER)


@contextlib.asynccontextmanager
async def open_stage(
    redis_url: str,
    model_folder: Path,
    tokenizer: Tokenizer,
    apis: Sequence[Api] = APIS,
    timings: Timings = USUAL,
    /,
    **changes: Any,
) -> AsyncIterator[Stage]:
    """Starts a gateway with its neighbours; `changes` are settings."""
    settings = GatewaySettings(
        **{
            "model": model_folder,
            "redis_url": redis_url,
            "port": 0,
            "grpc_port": 0,
            "shutdown_timeout": 1,
            **changes,
        }
    )
    table = TokenBytes.from_tokenizer_json(model_folder / "tokenizer.json")
    # Certificates of authorities, which nobody here asks for, would take a third of the time to read.
    async with (
        PreprocessPlayer(redis_url, MODEL, tokenizer) as preprocess,
        SchedulerPlayer(redis_url, MODEL, table) as scheduler,
        open_gateway(settings, apis=apis, timings=timings) as gateway,
        plain_client(gateway.url, timeout=60) as http,
        AsyncOpenAI(
            base_url=f"{gateway.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False),
        ) as openai,
    ):
        stage = Stage(gateway, settings, tokenizer, preprocess, scheduler, http, openai)
        stage.says(ANSWER)
        await until_ready(http)
        yield stage


async def until_ready(http: httpx.AsyncClient, seconds: float = 60) -> None:
    """Waits for the readiness page."""
    async with asyncio.timeout(seconds):
        while (await http.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.02)


async def until_empty(stage: Stage) -> None:
    """Waits until nothing is reserved, waiting or running, and nothing is followed."""
    async with asyncio.timeout(60):
        while await stage.scheduler.queue.depth() != (0, 0) or len(stage.gateway.follower):
            await asyncio.sleep(0.01)


def answer_slowly(stage: Stage) -> None:
    """Makes every answer one of 400 tokens that takes eight seconds or more."""

    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.02)

    stage.scheduler.step = step
    tokens = stage.tokenizer.encode("word").ids
    stage.scheduler.answer = lambda spec: (tokens for _ in range(400))


def pause_at(stage: Stage, step: int) -> asyncio.Event:
    """Lets every answer wait before one step until the event is set."""
    go = asyncio.Event()

    async def wait(rid: str, index: int) -> None:
        if index == step:
            await go.wait()

    stage.scheduler.step = wait
    return go
