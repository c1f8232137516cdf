"""Log-probabilities over REST and gRPC: what each token is called, its bytes, and that they fit the text."""

import json
import math
from typing import Any

import pytest

from services.gateway.api.openai.logprobs import LogprobsWriter
from services.gateway.following.logprobs import LogprobFold, TokenLogprob, prompt_entries
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TextFold, TokenBytes
from tests.support.gateway.neighbours import score
from tests.support.gateway.stage import MODEL, Stage
from tests.support.network.sse import events, texts_of

MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
TEXT = "The red 🦊 café 龍"


def bytes_of(content: list[Any]) -> bytes:
    return bytes(byte for entry in content for byte in entry["bytes"])


async def test_chat_has_an_entry_for_each_token_with_the_openai_client(stage: Stage) -> None:
    ids = stage.says(TEXT)
    reply = await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == len(ids)
    assert b"".join(bytes(e.bytes or []) for e in logprobs.content).decode() == TEXT
    pieces = stage.gateway.model.table.pieces
    for place, (token, entry) in enumerate(zip(ids, logprobs.content, strict=True)):
        (_, *top_ids), (own, *top) = score(token, place, 3)
        assert entry.logprob == pytest.approx(own)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(top)
        names = [pieces[t].decode("utf-8", "backslashreplace") for t in top_ids]
        assert [t.token for t in entry.top_logprobs] == names
    last = logprobs.content[-1]
    assert (last.token, last.bytes) == ("<|im_end|>", [])


async def test_parts_of_characters_have_their_own_bytes(stage: Stage) -> None:
    stage.says("🦊")
    content = (await stage.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert len(content) > 2
    assert bytes_of(content).decode() == "🦊"
    assert content[0]["token"].startswith("\\xf0")
    assert all(entry["top_logprobs"] == [] for entry in content)


async def test_streams_have_the_same_entries_as_whole_answers(stage: Stage) -> None:
    for size in (1, 3, 100):
        stage.says(TEXT + " STO STOP x", size)
        body: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": "STOP"}
        whole = (await stage.chat(**body)).json()["choices"][0]
        chunks = events((await stage.chat(**body, stream=True)).text)
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        content = [entry for logprobs in told if logprobs for entry in logprobs["content"]]
        assert content == whole["logprobs"]["content"]
        assert texts_of(chunks)[0] == whole["message"]["content"] == TEXT + " STO "


async def test_tokens_of_a_removed_stop_string_have_no_entry(stage: Stage) -> None:
    for stop in ("STOP", "TOP", "P text"):
        stage.says("END of STOP text. ")
        reply = (await stage.chat(logprobs=True, stop=stop)).json()
        text = reply["choices"][0]["message"]["content"]
        found = bytes_of(reply["choices"][0]["logprobs"]["content"]).decode()
        assert text == "END of STOP text. ".partition(stop)[0]
        # The token in which the stop string begins may reach into it.
        assert found.startswith(text) and (text + stop).startswith(found)
        assert reply["usage"]["completion_tokens"] >= len(
            reply["choices"][0]["logprobs"]["content"]
        )
    stage.says("END of STOP text. ")
    kept = (await stage.chat(logprobs=True, stop="STOP", include_stop_str_in_output=True)).json()
    assert bytes_of(kept["choices"][0]["logprobs"]["content"]).decode() == "END of STOP"


def test_entries_depend_on_the_tokens_alone() -> None:
    table = TokenBytes([bytes([97 + i]) for i in range(26)] + [b"xy", b"yz", b""], special_ids=[28])
    tokens = [0, 26, 28, 24, 1, 27, 25, 2, 23, 24, 25]
    stops = ["xyz", "yzq"]
    told: list[tuple[int, int]] = []
    fold, text = LogprobFold(table, True), TextFold(table, True, StopStrings(stops))
    given = ""
    for place, token in enumerate(tokens):
        given += text.push(token)
        fold.push(token, (float(place), []))
        for entry in fold.release(text.held_bytes):
            assert entry.logprob is not None
            assert given.startswith(entry.data.decode()[:1], entry.offset)
            told.append((entry.token, int(entry.logprob)))
    assert [place for _, place in told] == list(range(len(told)))
    told += [(entry.token, 0) for entry in fold.release(3)]
    assert [token for token, _ in told] == tokens[:-3]


async def test_completions_have_the_older_shape(stage: Stage) -> None:
    ids = stage.says("one 🦊 two")
    reply = await stage.openai.completions.create(model=MODEL, prompt="The", logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.text_offset is not None and logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(ids)
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset[-1] == len("one 🦊 two")
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert any(token.startswith("bytes:") for token in logprobs.tokens)
    for place, (token, top) in enumerate(zip(ids, logprobs.top_logprobs, strict=True)):
        assert logprobs.tokens[place] in top
        likeliest = score(token, place, 2)[0][1] == token
        assert len(top) == (2 if likeliest else 3), "the token itself and the top ones"
    assert (logprobs.token_logprobs or [])[2] == pytest.approx(-9.5)
    own = await stage.openai.completions.create(model=MODEL, prompt="The", logprobs=0)
    assert own.choices[0].logprobs is not None
    assert all(len(top) == 1 for top in own.choices[0].logprobs.top_logprobs or [])


async def test_completions_stream_the_older_shape(stage: Stage) -> None:
    stage.says("one 🦊 two STOP", 2)
    body = {"model": MODEL, "prompt": "The", "logprobs": 2, "stop": "STOP", "n": 2}
    whole = (await stage.http.post("/v1/completions", json=body)).json()
    reply = await stage.http.post("/v1/completions", json={**body, "stream": True})
    chunks = events(reply.text)
    for choice in whole["choices"]:
        told = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        for name, expected in choice["logprobs"].items():
            parts = [part["logprobs"][name] for part in told if part["logprobs"]]
            assert [item for part in parts for item in part] == expected


async def test_tokens_can_be_named_by_id(stage: Stage) -> None:
    ids = stage.says("ok 🦊")
    reply = await stage.chat(logprobs=True, return_tokens_as_token_ids=True)
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_entries_too(stage: Stage, stream: bool) -> None:
    stage.says(" circle")
    prompt = "The red 🦊"
    ids = stage.tokenizer.encode(prompt).ids
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream, "n": 2}
    reply = await stage.http.post("/v1/completions", json=body)
    chunks = events(reply.text) if stream else [reply.json()]
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        values = [value for part in told for value in part["token_logprobs"]]
        offsets = [offset for part in told for offset in part["text_offset"]]
        assert values[0] is None and told[0]["top_logprobs"][0] is None
        expected = [score(token, place, 1)[1][0] for place, token in enumerate(ids[1:])]
        assert values[1 : len(ids)] == pytest.approx(expected)
        assert offsets[len(ids)] == len(prompt), "the answer begins behind the prompt"
        assert texts_of(chunks)[index] == prompt + " circle"
        assert "prompt_logprobs" not in choices[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_have_vllms_shape(stage: Stage, stream: bool) -> None:
    reply = await stage.chat(prompt_logprobs=2, stream=stream, return_token_ids=True)
    body = events(reply.text)[0] if stream else reply.json()
    told, ids = body["prompt_logprobs"], body["prompt_token_ids"]
    assert told[0] is None and len(told) == len(ids)
    for place, (token, entry) in enumerate(zip(ids[1:], told[1:], strict=True)):
        top_ids, values = score(token, place, 2)
        assert set(entry) == {str(i) for i in top_ids}
        assert entry[str(token)]["logprob"] == pytest.approx(values[0])
        assert entry[str(token)]["rank"] == (1 if place % 3 != 2 else None)
        assert entry[str(token)]["decoded_token"] == stage.gateway.model.table.pieces[token].decode(
            "utf-8", "replace"
        )
    completion = await stage.http.post(
        "/v1/completions", json={"prompt": [5, 6, 7], "prompt_logprobs": 0}
    )
    told = completion.json()["choices"][0]["prompt_logprobs"]
    assert [entry and list(entry) for entry in told] == [None, ["6"], ["7"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_alone(stage: Stage, stream: bool) -> None:
    body = {"prompt": "The red", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    reply = await stage.http.post("/v1/completions", json=body)
    chunks = events(reply.text) if stream else [reply.json()]
    assert texts_of(chunks)[0] == "The red"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    told = chunks[0]["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(stage.tokenizer.encode("The red").ids)
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == 0
    spec = next(iter(stage.scheduler.played.values())).spec
    assert (spec.sampling.max_tokens, spec.sampling.prompt_logprobs) == (1, 0)


async def test_a_prompt_of_one_token_has_nothing_to_wait_for(stage: Stage) -> None:
    stage.says("ok")
    for stream in (False, True):
        body = {"prompt": [7], "echo": True, "logprobs": 1, "stream": stream}
        reply = await stage.http.post("/v1/completions", json=body)
        chunks = events(reply.text) if stream else [reply.json()]
        assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_a_token_that_the_tokenizer_put_in_front_takes_no_room() -> None:
    table = TokenBytes([b"<s>", b" The", b" red"], special_ids=[0], leading_spaces_stripped=1)
    scores: list[Any] = [(-1.0, []), (-2.0, [])]
    entries = list(prompt_entries(table, [0, 1, 2], "The red", scores))
    assert [entry.offset for entry in entries] == [0, 0, 3]
    assert [entry.data for entry in entries] == [b"", b"The", b" red"]
    entries = list(prompt_entries(table, [0, 1, 2], "<s> The red", scores))
    assert [entry.offset for entry in entries] == [0, 3, 7]


def test_numbers_that_json_lacks_are_written_as_vllm_does() -> None:
    table = TokenBytes([b"a", b"b"])
    writer = LogprobsWriter(table, is_chat=True, by_id=False, skip_special_tokens=True)
    entry = TokenLogprob(0, b"a", 0, -math.inf, [(1, math.nan), (9, -1.0)])
    (entry,) = json.loads("".join(writer.value([entry])))["content"]
    assert entry["logprob"] == -9999.0
    assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == [("b", None), ("", -1.0)]
