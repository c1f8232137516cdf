"""Several prompts in one request for completions: each is a request of its own, and all are one reply."""

import asyncio
import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from shared.errors import Internal
from shared.queue.token_log import decode_tokens
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.gateway.stage import MODEL, Stage, answer_slowly, open_stage, until_empty
from tests.support.network.sse import events, texts_of
from tests.support.tokenizers import token_id

PROMPTS = ["The red circle", "A blue square is", "Two"]


def repeats_prompts(stage: Stage) -> None:
    """Lets choice j of a prompt answer with the prompt's own tokens but its first j."""
    eos = token_id(stage.tokenizer, "<|im_end|>")

    def answer(spec: RequestSpec, choice: int) -> list[list[int]]:
        return [[token] for token in [*decode_tokens(spec.prompt)[choice:], eos]]

    stage.scheduler.answer_choice = answer


def expected_texts(stage: Stage, n: int) -> list[str]:
    ids = [stage.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    return [stage.tokenizer.decode(tokens[j:]) for tokens in ids for j in range(n)]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_the_openai_client_gets_every_choice_of_every_prompt(
    stage: Stage, as_ids: bool
) -> None:
    repeats_prompts(stage)
    ids = [stage.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    prompt: Any = ids if as_ids else PROMPTS
    reply = await stage.openai.completions.create(
        model=MODEL, prompt=prompt, n=2, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert [choice.text for choice in reply.choices] == expected_texts(stage, 2)
    choices: list[Any] = list(reply.choices)
    assert [c.prompt_token_ids for c in choices] == [i for i in ids for _ in range(2)]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    # Two choices of each prompt, of which the second has a token less; each with its end.
    assert reply.usage.completion_tokens == sum(2 * len(i) + 1 for i in ids)
    specs = [played.spec for played in stage.scheduler.played.values()]
    assert len(specs) == len({spec.sampling.seed for spec in specs}) == 3
    assert reply.id.removeprefix("cmpl-") in {spec.request_id for spec in specs}


async def test_streams_interleave_and_end_once(stage: Stage) -> None:
    repeats_prompts(stage)
    body: Any = {
        "prompt": PROMPTS,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "echo": True,
    }
    reply = await stage.http.post("/v1/completions", json=body)
    chunks = events(reply.text)
    order = [choice["index"] for chunk in chunks for choice in chunk["choices"]]
    assert set(order) == set(range(6)) and order != sorted(order)
    echoed = [prompt for prompt in PROMPTS for _ in range(2)]
    texts = [e + t for e, t in zip(echoed, expected_texts(stage, 2), strict=True)]
    assert texts_of(chunks) == dict(enumerate(texts))
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == list(range(6))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"] == f"cmpl-{reply.headers['x-request-id']}"
    usage = chunks[-1]["usage"]
    counts = [len(stage.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    assert chunks[-1]["choices"] == []
    assert usage["prompt_tokens"] == sum(counts)
    assert usage["completion_tokens"] == sum(2 * count + 1 for count in counts)
    assert reply.text.count("[DONE]") == 1


async def test_scores_of_every_prompt(stage: Stage) -> None:
    body: Any = {"prompt": PROMPTS, "prompt_logprobs": 1, "max_tokens": 0}
    for stream in (False, True):
        reply = await stage.http.post("/v1/completions", json={**body, "stream": stream})
        chunks = events(reply.text) if stream else [reply.json()]
        scores = {
            choice["index"]: choice["prompt_logprobs"]
            for chunk in chunks
            for choice in chunk["choices"]
            if "prompt_logprobs" in choice
        }
        for index, prompt in enumerate(PROMPTS):
            assert len(scores[index]) == len(stage.tokenizer.encode(prompt).ids)


async def test_none_is_started_if_one_is_refused(stage: Stage) -> None:
    too_long = "word " * 600
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.openai.completions.create(model=MODEL, prompt=["a", "b", too_long])
    assert caught.value.param == "prompt[2]" and "prompt[2]" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.openai.completions.create(model=MODEL, prompt=[[1], [2], [10**6]])
    assert caught.value.param == "prompt[2][0]"
    await until_empty(stage)
    await asyncio.sleep(0.05)
    assert not stage.scheduler.played


async def test_limits(redis_url: str, model_folder: Any, tokenizer: Tokenizer) -> None:
    limits = {"max_prompts": 3, "max_waiting_requests": 2}
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        with pytest.raises(openai.BadRequestError, match="more than 3 prompts"):
            await stage.openai.completions.create(model=MODEL, prompt=["a"] * 4)
        # The queue has room for two: none of the three is left in it.
        with pytest.raises(openai.RateLimitError):
            await stage.openai.completions.create(model=MODEL, prompt=["a"] * 3)
        await until_empty(stage)
        assert not stage.scheduler.played
        reply = await stage.openai.completions.create(model=MODEL, prompt=["a"] * 2)
        assert len(reply.choices) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all(stage: Stage, stream: bool) -> None:
    answer_slowly(stage)
    body = json.dumps({"prompt": PROMPTS, "stream": stream}).encode()
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(60):
        while len(stage.scheduler.played) < len(PROMPTS):
            await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()
    await until_empty(stage)
    async with asyncio.timeout(60):
        for played in stage.scheduler.played.values():
            await played.ended.wait()
    assert all(played.cancelled for played in stage.scheduler.played.values())


async def test_an_error_of_one_prompt_ends_the_reply_and_cancels_the_others(stage: Stage) -> None:
    answer_slowly(stage)
    word = stage.tokenizer.encode("word").ids
    short = stage.tokenizer.encode(PROMPTS[2]).ids

    def answer(spec: RequestSpec) -> Any:
        return [word] if decode_tokens(spec.prompt) == short else (word for _ in range(400))

    stage.scheduler.answer = answer
    stage.scheduler.failure = Internal("NAN_LOGITS", "x").to_failure()
    for stream in (False, True):
        body: Any = {"prompt": PROMPTS, "stream": stream}
        reply = await stage.http.post("/v1/completions", json=body)
        assert reply.status_code == (200 if stream else 500)
        assert "nan_logits" in reply.text and "[DONE]" not in reply.text
        await until_empty(stage)
    async with asyncio.timeout(60):
        for played in stage.scheduler.played.values():
            await played.ended.wait()
    assert sum(played.cancelled for played in stage.scheduler.played.values()) == 4
