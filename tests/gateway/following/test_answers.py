"""Answers over REST, as OpenAI clients see them."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from tests.support.gateway.neighbours import IMAGE_TOKENS
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.network.sse import event_ids, events

MESSAGES: Any = [{"role": "user", "content": "What is there?"}]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def test_the_openai_client_gets_a_whole_answer(stage: Stage) -> None:
    reply = await stage.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == MODEL
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 11
    assert reply.usage.completion_tokens == len(stage.says(ANSWER))
    assert reply._request_id is not None and reply.id == f"chatcmpl-{reply._request_id}"


async def test_the_openai_client_gets_a_stream_with_usage(stage: Stage) -> None:
    stream = await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 11 + len(stage.says(ANSWER))
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_synchronous_client_works_too(stage: Stage) -> None:
    def ask() -> str:
        with OpenAI(base_url=f"{stage.gateway.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="The", stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == ANSWER


async def test_stream_and_whole_reply_agree_however_tokens_arrive(stage: Stage) -> None:
    for size in (1, 3, 100):
        stage.says(ANSWER, size)
        whole = (await stage.chat(seed=1)).json()
        streamed = events((await stage.chat(seed=1, stream=True)).text)
        assert text_of(streamed) == whole["choices"][0]["message"]["content"] == ANSWER
        assert streamed[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


async def test_characters_split_over_tokens_arrive_whole(stage: Stage) -> None:
    text = "🦊 over 龍 é 👩‍👩‍👧 end"
    stage.says(text)
    assert len(stage.tokenizer.encode("🦊").ids) > 1
    chunks = events((await stage.chat(stream=True)).text)
    assert text_of(chunks) == text
    assert not any("\ufffd" in json.dumps(chunk) for chunk in chunks)


async def test_an_incomplete_character_at_the_end_is_replaced(stage: Stage) -> None:
    stage.says("a🦊")
    tokens = stage.tokenizer.encode("a🦊").ids
    stage.scheduler.answer = lambda spec: [[token] for token in tokens[:-1]]
    assert text_of(events((await stage.chat(stream=True)).text)) == "a\ufffd"
    assert (await stage.chat()).json()["choices"][0]["message"]["content"] == "a\ufffd"


async def test_event_ids_count_tokens_and_mark_the_end(stage: Stage) -> None:
    count = len(stage.says("The red circle"))
    reply = await stage.chat(with_ids=True, stream=True)
    rid = reply.headers["x-request-id"]
    found = event_ids(reply.text)
    assert found[0] == f"{rid}/0"
    assert found[-1] == f"{rid}/{count}e"
    assert reply.headers["content-type"].startswith("text/event-stream")


async def test_stop_strings_are_cut_across_chunks(stage: Stage) -> None:
    for size in (1, 4, 100):
        stage.says("one two ST STO STOP three", size)
        whole = (await stage.chat(stop=["STOP", "never"])).json()["choices"][0]
        chunks = events((await stage.chat(stop=["STOP", "never"], stream=True)).text)
        assert whole["message"]["content"] == text_of(chunks) == "one two ST STO "
        for choice in (whole, chunks[-1]["choices"][0]):
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")


async def test_a_stop_string_can_be_kept(stage: Stage) -> None:
    stage.says("one STOP", 1)
    reply = await stage.chat(stop="STOP", include_stop_str_in_output=True)
    assert reply.json()["choices"][0]["message"]["content"] == "one STOP"


async def test_max_tokens_ends_with_length(stage: Stage) -> None:
    reply = (await stage.chat(max_tokens=3)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 3


async def test_special_tokens_are_shown_on_request(stage: Stage) -> None:
    stage.says("ok")
    shown = (await stage.chat(skip_special_tokens=False)).json()
    assert shown["choices"][0]["message"]["content"] == "ok<|im_end|>"
    assert shown["choices"][0]["stop_reason"] is None


async def test_token_ids_are_returned_in_vllm_shape(stage: Stage) -> None:
    tokens = stage.says("ok 🦊")
    whole = (await stage.chat(return_token_ids=True)).json()
    assert whole["choices"][0]["token_ids"] == tokens
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    chunks = events((await stage.chat(return_token_ids=True, stream=True)).text)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids", [])]
    assert streamed == tokens
    assert "token_ids" not in (await stage.chat()).text


async def test_ids_of_a_prompt_stand_in_the_choices_of_completions(stage: Stage) -> None:
    ids = stage.tokenizer.encode("The red").ids
    body = {"prompt": "The red", "return_token_ids": True, "n": 2}
    whole = (await stage.http.post("/v1/completions", json=body)).json()
    streamed = events((await stage.http.post("/v1/completions", json=body | {"stream": True})).text)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids, ids]
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    told = [choice for choice in choices if "prompt_token_ids" in choice]
    assert [(c["index"], c["prompt_token_ids"]) for c in told] == [(0, ids), (1, ids)]
    assert not any("prompt_token_ids" in reply for reply in [whole, *streamed])


@pytest.mark.parametrize("named", ["<|im_end|>", {"content": "<|im_end|>"}, "<|endoftext|>", None])
async def test_end_ids_that_the_tokenizer_does_not_name_are_stop_reasons(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, named: Any
) -> None:
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (model_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    told = ends[1] if named == "<|endoftext|>" else None
    async with open_stage(redis_url, model_folder, tokenizer) as stage:
        (choice,) = (await stage.chat()).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", told)
        streamed = events((await stage.chat(stream=True)).text)
        assert streamed[-1]["choices"][0]["stop_reason"] == told
        asked = await stage.chat(ignore_eos=True, stop_token_ids=[ends[1]])
        assert asked.json()["choices"][0]["stop_reason"] == ends[1]


async def test_usage_can_come_with_every_chunk(stage: Stage) -> None:
    stage.says("The red")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await stage.chat(stream=True, stream_options=options)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 3


async def test_completions_echo_the_prompt(stage: Stage) -> None:
    stage.says(" circle")
    for stream in (True, False):
        body = {"model": MODEL, "prompt": "The red", "echo": True, "stream": stream}
        reply = await stage.http.post("/v1/completions", json=body)
        chunks = events(reply.text) if stream else [reply.json()]
        assert text_of(chunks) == "The red circle"
        assert chunks[0]["object"] == "text_completion"
        assert chunks[0]["id"].startswith("cmpl-r_")


async def test_completions_take_token_ids(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("The red").ids
    reply = await stage.http.post("/v1/completions", json={"prompt": tokens})
    assert reply.json()["usage"]["prompt_tokens"] == len(tokens)


async def test_pictures_reach_preprocess_as_bytes_or_address(stage: Stage) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"picture").decode()
    content = [
        {"type": "text", "text": "which?"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": "https://example.org/b.png"},
    ]
    reply = await stage.chat(messages=[{"role": "user", "content": content}])
    assert reply.status_code == 200
    parts = stage.preprocess.seen[-1].conversation.messages[0].content
    assert parts[1].media.data == b"picture"
    assert parts[2].media.url == "https://example.org/b.png"
    assert reply.json()["usage"]["prompt_tokens"] > 2 * IMAGE_TOKENS
    spec = next(iter(stage.scheduler.played.values())).spec
    assert len(spec.media) == 2


async def test_what_the_scheduler_gets_is_complete(stage: Stage) -> None:
    reply = await stage.chat(
        user="ada", seed=5, max_tokens=7, temperature=0.5, stop="x", logit_bias={"3": -1}
    )
    spec = stage.scheduler.played[reply.headers["x-request-id"]].spec
    assert spec.model == MODEL and spec.created_unix_s == reply.json()["created"]
    assert len(spec.prompt) == 4 * reply.json()["usage"]["prompt_tokens"]
    sampling = spec.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.temperature) == (5, 7, 0.5)
    assert sampling.top_k == 20, "from generation_config.json"
    assert list(sampling.stop) == ["x"] and dict(sampling.logit_bias) == {3: -1}
    assert list(sampling.stop_token_ids) == [stage.tokenizer.token_to_id("<|im_end|>")]
    assert spec.tenant.startswith("u")


async def test_many_streams_at_once_keep_apart(stage: Stage) -> None:
    stage.scheduler.answer = lambda spec: [
        [token] for token in stage.tokenizer.encode(f"answer {spec.sampling.seed} of many").ids
    ]
    replies = await asyncio.gather(*(stage.chat(seed=n, stream=True) for n in range(40)))
    assert [text_of(events(r.text)) for r in replies] == [f"answer {n} of many" for n in range(40)]
