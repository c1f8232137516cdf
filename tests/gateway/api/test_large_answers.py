"""Answers that come in pieces say what small ones say, to every kind of client, and are not held in memory."""

import asyncio
import json
from typing import Any

import pytest

from services.gateway.slices import Slices
from tests.support.gateway.stage import Stage
from tests.support.network.sse import events, merged

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
SCORES = {"logprobs": True, "top_logprobs": 20}
TOKENS = 200


def says_long(stage: Stage) -> None:
    ids = stage.says("The red 🦊 café 龍 stands left of it. " * 20)[:-1]
    stage.scheduler.answer = lambda spec: [ids[:TOKENS][i : i + 9] for i in range(0, TOKENS, 9)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "n": 3, **SCORES}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 3, "return_token_ids": True, **SCORES}),
        (COMPLETIONS, {"prompt": [7] * 200, "n": 2, "logprobs": 20, "echo": True}),
        (COMPLETIONS, {"prompt": [7] * 200, "n": 2, "prompt_logprobs": 20}),
        (COMPLETIONS, {"prompt": [[7] * 200, [8] * 200], "prompt_logprobs": 20, "n": 2}),
        (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 20, "return_token_ids": True, "n": 2}),
    ],
)
async def test_a_large_whole_answer_is_what_its_stream_adds_up_to(
    stage: Stage, path: str, body: dict[str, Any]
) -> None:
    says_long(stage)
    asked = {**body, "max_tokens": TOKENS}
    whole = await stage.http.post(path, json=asked)
    assert whole.status_code == 200 and whole.headers["transfer-encoding"] == "chunked"
    streamed = await stage.http.post(
        path, json={**asked, "stream": True, "stream_options": {"include_usage": True}}
    )
    reply = whole.json()
    found = merged(events(streamed.text))
    assert reply["usage"] == found["usage"]
    for choice in reply["choices"]:
        pieces = found["choices"][choice["index"]]
        message = choice.pop("message", None)
        if message is not None:
            assert pieces.pop("delta") == {"role": "assistant", "content": message["content"]}
        if choice["logprobs"] is not None:
            assert pieces["logprobs"].pop("refusal", None) is None
            choice["logprobs"].pop("refusal", None)
        assert choice == pieces
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert reply.get(name) == found.get(name)


async def test_a_small_answer_has_its_length(stage: Stage) -> None:
    reply = await stage.chat(n=2, logprobs=True)
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert "transfer-encoding" not in reply.headers


async def test_a_large_answer_ends_with_the_connection_of_http_1_0(stage: Stage) -> None:
    says_long(stage)
    asked = {"messages": MESSAGES, "max_tokens": TOKENS, **SCORES}
    body = json.dumps(asked).encode()
    host, port = stage.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, content = answer.decode().partition("\r\n\r\n")
    assert "chunked" not in head.lower()
    assert len(json.loads(content)["choices"][0]["logprobs"]["content"]) == TOKENS


async def test_tokens_of_a_long_text_come_in_pieces(stage: Stage) -> None:
    text = "red circle " * 30_000
    reply = await stage.http.post("/tokenize", json={"prompt": text})
    ids = stage.tokenizer.encode(text).ids
    assert reply.json() == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert reply.headers["transfer-encoding"] == "chunked"


async def test_long_work_takes_turns_and_leaves_the_loop_to_others() -> None:
    slices = Slices()
    done: list[str] = []

    async def work(name: str) -> None:
        for _ in range(3):
            await slices.turn()
            done.append(name)

    async def watch() -> None:
        for _ in range(40):
            done.append("-")
            await asyncio.sleep(0)

    leaving = asyncio.create_task(work("x"))
    watching = asyncio.create_task(watch())
    tasks = [asyncio.create_task(work(name)) for name in "abcdef"]
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([watching, *tasks])
    assert all(done.count(name) == 3 for name in "abcdef")
    between = "".join(done).split("-")
    assert max(map(len, between)) <= 4
