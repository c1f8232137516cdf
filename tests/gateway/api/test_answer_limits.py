"""How large a whole answer may become is bounded before anything is done for it, for each and for all together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.stage import Stage, open_stage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
SCORES = {"logprobs": True, "top_logprobs": 20}


@pytest.fixture
def limits() -> dict[str, int]:
    return {"max_answer_bytes": 50_000, "max_answer_bytes_in_flight": 60_000}


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 24, **SCORES}, ["max_tokens", "top_logprobs"]),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 12, "n": 2, **SCORES},
            ["max_tokens", "n", "top_logprobs"],
        ),
        (CHAT, {"messages": MESSAGES, "max_tokens": 64, "n": 64}, ["max_tokens", "n"]),
        (
            COMPLETIONS,
            {"prompt": [1] * 30, "max_tokens": 1, "prompt_logprobs": 20},
            ["max_tokens", "prompt_logprobs"],
        ),
        (
            COMPLETIONS,
            {"prompt": [1] * 20, "max_tokens": 2, "logprobs": 20, "echo": True, "n": 2},
            ["max_tokens", "n", "logprobs"],
        ),
        (
            COMPLETIONS,
            {"prompt": ["a"] * 3, "max_tokens": 8, "logprobs": 20},
            ["max_tokens", "logprobs"],
        ),
    ],
)
async def test_an_answer_that_may_become_too_large_is_refused_by_the_fields_that_make_it_so(
    redis_url: str,
    model_folder: Path,
    tokenizer: Tokenizer,
    limits: dict[str, int],
    path: str,
    body: dict[str, Any],
    fields: list[str],
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        reply = await stage.http.post(path, json=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "answer_too_large" and error["param"] == fields[-1]
        assert f"by {', '.join(fields)};" in error["message"]
        assert await stage.scheduler.queue.depth() == (0, 0)
        smaller = {**body, "max_tokens": 1, "n": 1, "prompt_logprobs": None, "echo": False}
        assert (await stage.http.post(path, json=smaller)).status_code == 200
        streamed = await stage.http.post(path, json={**body, "stream": True})
        assert streamed.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "x" * 400, "max_tokens": 1, "n": 128}),
        ("/generate", {"inputs": "x" * 50_000, "parameters": {"return_full_text": True}}),
        (
            "/v2/models/tiny-vl/generate",
            {"text_input": "x" * 50_000, "exclude_input_in_output": False},
        ),
    ],
)
async def test_a_prompt_that_answers_repeat_is_counted(
    redis_url: str,
    model_folder: Path,
    tokenizer: Tokenizer,
    limits: dict[str, int],
    path: str,
    body: dict[str, Any],
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        reply = await stage.http.post(path, json=body)
        assert reply.status_code == 400
        assert "and the prompt, which each choice repeats; the limit is 50000" in reply.text
        assert await stage.scheduler.queue.depth() == (0, 0)


async def test_answers_under_way_share_a_budget_that_is_given_back(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, limits: dict[str, int]
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, **SCORES}
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        go = asyncio.Event()

        async def wait(request_id: str, index: int) -> None:
            await go.wait()

        stage.scheduler.step = wait
        first = asyncio.create_task(stage.chat(**body))
        await stage.scheduler.taken()
        refused = await stage.chat(**body)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_answers"
        streaming = asyncio.create_task(stage.chat(**body, stream=True))
        go.set()
        assert (await first).status_code == (await streaming).status_code == 200
        for _ in range(3):
            assert (await stage.chat(**body)).status_code == 200
        leaving = asyncio.create_task(stage.chat(**body))
        leaving.cancel()
        await asyncio.wait([leaving])
        async with asyncio.timeout(60):
            while (await stage.chat(**body)).status_code == 503:
                await asyncio.sleep(0.05)


async def test_lists_that_each_of_many_prompts_would_get_are_bounded(stage: Stage) -> None:
    body = {"prompt": ["a"] * 128, "allowed_token_ids": list(range(9)) * 900, "max_tokens": 1}
    reply = await stage.http.post(COMPLETIONS, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "allowed_token_ids"
    reply = await stage.http.post(COMPLETIONS, json={**body, "prompt": ["a"] * 8})
    assert reply.status_code == 200
