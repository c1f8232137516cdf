"""No request, however large, keeps the event loop from others: the longest processor time of its thread between two
turns, over the largest requests and answers of every kind that are served.
"""

import base64
import contextlib
import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import (
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    GenerationOptions,
    TokenIds,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.process import beside
from tests.support.gateway.stage import Stage, open_stage
from tests.support.gateway.turns import LongestTurn, slowness
from tests.support.network.ports import free_ports

MOST_S = 0.05
TRIES = 3  # copies of large bodies take longer while other processes use the memory's bandwidth
BODY = 31 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION: Any = [{"role": "user", "content": "What is there?"}]
IDS = 65_536
MODEL_LEN = 8192
FLAGS = ("--max-model-len", str(MODEL_LEN), "--log-level", "error")


@dataclass
class Watched:
    """A gateway whose turns are measured, its REST API, and its gRPC API."""

    stage: Stage
    http: httpx.AsyncClient
    grpc: Any  # ChatServiceStub, whose type does not know asyncio
    turn: LongestTurn

    async def post(self, path: str, **body: Any) -> int:
        """Sends a request, and returns how many bytes were answered."""
        content = json.dumps(body).encode()
        reply = await self.http.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 200, reply.text[:500]
        return len(reply.content)

    async def chat(self, request: ChatRequest) -> None:
        """The same by gRPC."""
        assert [event async for event in self.grpc.Chat(request)][-1].HasField("usage")

    async def complete(self, request: CompleteRequest) -> None:
        """The same by gRPC."""
        assert [event async for event in self.grpc.Complete(request)][-1].HasField("usage")


@contextlib.asynccontextmanager
async def watched(
    redis_url: str, folder: Path, tokenizer: Tokenizer, short_tmp: Path
) -> AsyncIterator[Watched]:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = IDS
    (folder / "config.json").write_text(json.dumps(config))
    turn = LongestTurn(short_tmp / "turn")
    program = ("tests.support.gateway.turns", str(short_tmp / "turn"))
    [port] = free_ports(1)
    async with (
        open_stage(redis_url, folder, tokenizer) as stage,
        beside(stage, *FLAGS, "--grpc-port", str(port), program=program) as (_, http),
        open_channel(f"127.0.0.1:{port}", 64 << 20) as channel,
    ):
        ids = stage.says("The red circle stands left of the blue square. " * 20)
        stage.scheduler.answer = lambda spec: (
            [ids[i % len(ids) - 1]] for i in range(spec.sampling.max_tokens)
        )
        yield Watched(stage, http, ChatServiceStub(channel), turn)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def of_user(*parts: Any) -> Any:
    return [{"role": "user", "content": list(parts)}]


def grpc_chat(*parts: ContentPart, **options: Any) -> ChatRequest:
    message = ChatMessage(role="user", content=parts or [ContentPart(text="What is there?")])
    return ChatRequest(messages=[message], options=GenerationOptions(**options))


PERCENT = "data:image/png," + "%89" * (BODY // 3)
BASE64 = "data:image/png;base64," + base64.b64encode(os.urandom(BODY * 3 // 4)).decode()
SMALL = "data:image/png;base64," + "aaaa" * 800
BIAS = {str(token): 1 for token in range(IDS)}
STOPS = ["😀" * 1023 + chr(65 + i) for i in range(16)]
Ask = Callable[[Watched], Awaitable[object]]
BODIES: dict[str, Ask] = {
    "percent": lambda it: it.post(CHAT, messages=of_user(image(PERCENT)), max_tokens=1),
    "percent with escapes": lambda it: it.post(
        CHAT, messages=of_user(image(PERCENT + "é")), max_tokens=1
    ),
    "base64": lambda it: it.post(CHAT, messages=of_user(image(BASE64)), max_tokens=1),
    "base64 with escapes": lambda it: it.post(
        CHAT, messages=of_user(image(BASE64 + "\n")), max_tokens=1
    ),
    "pictures": lambda it: it.post(CHAT, messages=of_user(*[image(SMALL)] * 2000), max_tokens=1),
    "messages": lambda it: it.post(
        CHAT, messages=[{"role": "user", "content": ""}] * 800, max_tokens=1
    ),
    "parts": lambda it: it.post(
        CHAT, messages=of_user(*[{"type": "text", "text": ""}] * 8192), max_tokens=1
    ),
    "stops": lambda it: it.post(CHAT, messages=QUESTION, stop=STOPS, n=8, max_tokens=8),
    "logit_bias": lambda it: it.post(CHAT, messages=QUESTION, logit_bias=BIAS, max_tokens=1),
    "allowed ids": lambda it: it.post(
        CHAT, messages=QUESTION, allowed_token_ids=list(range(IDS)), max_tokens=1
    ),
    "ids": lambda it: it.post(COMPLETIONS, prompt=[1] * (MODEL_LEN - 1), max_tokens=1),
    "prompts": lambda it: it.post(
        COMPLETIONS, prompt=["a"] * 128, allowed_token_ids=list(range(7800)), max_tokens=1
    ),
    "values": lambda it: it.post(
        COMPLETIONS, prompt="a", metadata={"a": list(range(990_000))}, max_tokens=1
    ),
    "detokenize": lambda it: it.post("/detokenize", tokens=[5] * IDS),
    "gRPC bytes": lambda it: it.chat(grpc_chat(ContentPart(image=os.urandom(BODY)), max_tokens=1)),
    "gRPC URL": lambda it: it.chat(grpc_chat(ContentPart(image_url=PERCENT), max_tokens=1)),
}
SCORES: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
IDS_4000 = [5] * 4000
ANSWERS: dict[str, Ask] = {
    "choices": lambda it: it.post(CHAT, messages=QUESTION, n=128, max_tokens=64, **SCORES),
    "choices streamed": lambda it: it.post(
        CHAT, messages=QUESTION, n=128, max_tokens=32, stream=True, **SCORES
    ),
    "choices of completions": lambda it: it.post(
        COMPLETIONS, prompt="a", n=128, max_tokens=32, logprobs=20, return_token_ids=True
    ),
    "prompt": lambda it: it.post(COMPLETIONS, prompt=IDS_4000, prompt_logprobs=20, max_tokens=1),
    "prompt, many times": lambda it: it.post(
        COMPLETIONS, prompt=IDS_4000, prompt_logprobs=20, max_tokens=1, n=8
    ),
    "prompt streamed": lambda it: it.post(
        COMPLETIONS, prompt=IDS_4000, prompt_logprobs=20, max_tokens=1, n=8, stream=True
    ),
    "prompt repeated": lambda it: it.post(
        COMPLETIONS, prompt=IDS_4000, logprobs=20, echo=True, max_tokens=1
    ),
    "gRPC choices": lambda it: it.chat(grpc_chat(n=128, max_tokens=16, logprobs=20)),
    "gRPC prompt": lambda it: it.complete(
        CompleteRequest(
            token_ids=TokenIds(ids=IDS_4000),
            options=GenerationOptions(prompt_logprobs=20, max_tokens=1, n=2),
        )
    ),
    "gRPC prompt repeated": lambda it: it.complete(
        CompleteRequest(
            token_ids=TokenIds(ids=IDS_4000),
            echo=True,
            options=GenerationOptions(logprobs=20, max_tokens=1, n=2),
        )
    ),
}
# The same for longer, and texts, whose tokens take the stand-in of preprocess seconds.
LONG: dict[str, Ask] = {
    "choices": lambda it: it.post(CHAT, messages=QUESTION, n=128, max_tokens=600, **SCORES),
    "a long stream": lambda it: it.post(
        CHAT, messages=QUESTION, max_tokens=4000, stream=True, **SCORES
    ),
    "tokenize": lambda it: it.post("/tokenize", prompt="word " * (1 << 20)),
    "text": lambda it: it.post(
        "/tokenize", messages=of_user({"type": "text", "text": "a " * 9**7})
    ),
    "models": lambda it: it.http.get("/v1/models"),
}
# One of each way in which a body is read and an answer is written.
BY_DEFAULT = (
    *("percent with escapes", "base64", "pictures", "parts", "stops", "logit_bias", "ids"),
    *("detokenize", "gRPC bytes", "choices", "choices streamed", "prompt", "gRPC choices"),
)


def some(asks: dict[str, Ask], by_default: bool) -> dict[str, Ask]:
    return {name: ask for name, ask in asks.items() if (name in BY_DEFAULT) == by_default}


@pytest.mark.parametrize(
    "asks",
    [
        pytest.param(some(BODIES, True), id="bodies"),
        pytest.param(some(BODIES, False), id="other bodies", marks=pytest.mark.full),
        pytest.param(some(ANSWERS, True), id="answers"),
        pytest.param(some(ANSWERS, False), id="other answers", marks=pytest.mark.full),
        pytest.param(LONG, id="long", marks=pytest.mark.full),
    ],
)
async def test_the_loop_is_never_kept_for_long(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, short_tmp: Path, asks: dict[str, Ask]
) -> None:
    too_long: dict[str, list[float]] = {}
    most_s = MOST_S * slowness()
    async with watched(redis_url, model_folder, tokenizer, short_tmp) as it:
        for name, ask in asks.items():
            turns: list[float] = []
            while len(turns) < TRIES and min(turns, default=math.inf) > most_s:
                it.turn.reset()
                await ask(it)
                turns.append(it.turn.seconds)
            if min(turns) > most_s:
                too_long[name] = turns
    assert too_long == {}
