"""vLLM's POST /generate: whole, as lines, from every line on, and beside TGI at one path."""

import itertools
import json
from typing import Any

import pytest

from services.gateway.gateway import Gateway
from tests.support.gateway.stage import ANSWER, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS
from tests.support.pictures import data_url, png

PROMPT = "What is there?"


def lines(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.splitlines()]


async def test_the_prompt_stands_before_each_answer(stage: Stage) -> None:
    reply = await stage.http.post("/generate", json={"prompt": PROMPT, "n": 2})
    assert reply.json() == {"text": [PROMPT + ANSWER] * 2}
    spec = stage.scheduler.played[reply.headers["x-request-id"]].spec
    assert (spec.sampling.max_tokens, spec.sampling.n) == (16, 2)
    asked = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0.5, "seed": 4, "stop": "blue"}
    reply = await stage.http.post("/generate", json=asked)
    sampling = stage.scheduler.played[reply.headers["x-request-id"]].spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (3, 0.5, 4)
    assert list(sampling.stop) == ["blue"]


async def test_each_line_of_a_stream_has_all_until_then(stage: Stage) -> None:
    asked = {"prompt": PROMPT, "stream": True, "n": 2}
    reply = await stage.http.post("/generate", json=asked)
    assert reply.headers["content-type"] == "application/x-ndjson"
    texts = [line["text"] for line in lines(reply.text)]
    assert texts[-1] == [PROMPT + ANSWER] * 2
    for before, after in itertools.pairwise(texts):
        assert all(new.startswith(old) for old, new in zip(before, after, strict=True))


async def test_lines_that_repeat_too_much_are_refused(stage: Stage) -> None:
    body = {"prompt": "x" * 9000, "n": 128, "max_tokens": 1}
    reply = await stage.http.post("/generate", json={**body, "stream": True})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "prompt")
    assert "n choices" in error["message"] and "stream" in error["message"]
    assert not stage.scheduler.played


async def test_a_large_reply_comes_in_pieces(stage: Stage) -> None:
    stage.says("x")
    prompt = 'é"\n' * 100
    reply = await stage.http.post("/generate", json={"prompt": prompt, "n": 128, "max_tokens": 1})
    assert reply.json() == {"text": [f"{prompt}x"] * 128}, reply.text[:200]
    assert "content-length" not in reply.headers


async def test_the_rest_after_every_line_at_another_gateway(stage: Stage, other: Gateway) -> None:
    asked = {"prompt": PROMPT, "stream": True, "stop": ["nothing"]}
    reply = await stage.http.post("/generate", json=asked, headers=ASK_FOR_IDS)
    found = lines(reply.text)
    rid = reply.headers["x-request-id"]
    async with plain_client(other.url, timeout=60) as client:
        for index, line in enumerate(found[:-1], 1):
            after = {"after": line["event_id"]}
            rest = await client.get(f"/v1/requests/{rid}/stream", params=after)
            # Deltas of neighbouring tokens may come as one.
            again = lines(rest.text)
            assert again[-1] == found[-1]
            assert all(entry in found[index:] for entry in again)


async def test_one_path_has_two_apis(stage: Stage) -> None:
    tgi = await stage.http.post("/generate", json={"inputs": PROMPT})
    assert tgi.json() == {"generated_text": ANSWER}
    large = {"prompt": [{"image": data_url(png(1, (300, 300)))}, {"text": PROMPT}]}
    vllm = await stage.http.post("/generate", json=large)
    assert vllm.json() == {"text": [PROMPT + ANSWER]}
    (message,) = stage.preprocess.seen[-1].conversation.messages
    assert message.content[0].media.data == png(1, (300, 300))
    neither = await stage.http.post("/generate", json={})
    assert neither.status_code == 400
    assert "`inputs` or `prompt`" in neither.json()["error"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [{"type": "audio"}]}, "prompt[0].type"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x", "guided_json": {"type": "x"}}, "guided_json"),
        ({"prompt": "x", "tools": [{}]}, "tools"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named_in_the_form_of_vllm(
    stage: Stage, content: Any, param: str
) -> None:
    reply = await stage.http.post("/generate", json=content)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not stage.scheduler.played
