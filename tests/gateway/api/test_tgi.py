"""TGI's API: Hugging Face's client, the events of a stream from every token on, and what is refused."""

import asyncio
import json
import random
import re
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, TextGenerationInputGrammarType
from huggingface_hub.errors import ValidationError

from services.gateway.api.tgi.markdown_images import split_at_images
from services.gateway.gateway import Gateway
from shared.errors import Unavailable
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.stage import ANSWER, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, event_ids
from tests.support.pictures import data_url, png

INPUTS = "What is there?"


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": INPUTS, "parameters": parameters}


def tokens(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, of which every line is understood."""
    lines = [line for line in stream.split("\n") if line and not line.startswith("id: ")]
    assert all(line.startswith("data:") for line in lines)
    return [json.loads(line.removeprefix("data:")) for line in lines]


async def test_the_client_of_hugging_face(stage: Stage) -> None:
    ids = stage.says(ANSWER)
    async with AsyncInferenceClient(model=stage.gateway.url) as client:
        assert await client.text_generation(INPUTS) == ANSWER
        pieces = [piece async for piece in await client.text_generation(INPUTS, stream=True)]
        assert "".join(pieces) == ANSWER + "<|im_end|>" and len(pieces) == len(ids)
        whole = await client.text_generation(INPUTS, details=True, decoder_input_details=True)
        assert whole.generated_text == ANSWER and whole.details is not None
        details = whole.details
        assert (details.finish_reason, details.generated_tokens) == ("eos_token", len(ids))
        assert [token.id for token in details.tokens] == ids
        assert "".join(token.text for token in details.tokens) == ANSWER + "<|im_end|>"
        assert [token.special for token in details.tokens] == [False] * (len(ids) - 1) + [True]
        assert all(token.logprob < 0 for token in details.tokens)
        prompt = stage.tokenizer.encode(INPUTS)
        assert [entry.id for entry in details.prefill] == prompt.ids
        assert details.prefill[0].logprob is None and (details.prefill[1].logprob or 0) < 0
        events = [
            event async for event in await client.text_generation(INPUTS, stream=True, details=True)
        ]
        last = events[-1]
        assert last.generated_text == ANSWER and last.details is not None
        assert (last.details.finish_reason, last.details.input_length) == (
            "eos_token",
            len(prompt.ids),
        )
        assert [event.token.logprob for event in events] == [t.logprob for t in details.tokens]
        with pytest.raises(ValidationError, match=r"parameters\.top_p must be between"):
            await client.text_generation(INPUTS, top_p=3.0)


@pytest.mark.parametrize("size", [1, 3])
async def test_the_rest_after_every_token_at_another_gateway(
    stage: Stage, other: Gateway, size: int
) -> None:
    written = f"A 🦄 in several tokens. {ANSWER}"
    stage.says(written, size)
    asked = body(details=True, top_n_tokens=2, return_full_text=True)
    reply = await stage.http.post("/generate_stream", json=asked, headers=ASK_FOR_IDS)
    found, places = tokens(reply.text), event_ids(reply.text)
    assert len(found) == len(places) and found[-1]["generated_text"] == INPUTS + written
    assert size > 1 or "" in [event["token"]["text"] for event in found], "parts of a character"
    rid = reply.headers["x-request-id"]
    async with plain_client(other.url, timeout=60) as client:
        for index, place in enumerate(places[:-1], 1):
            rest = await client.get(f"/v1/requests/{rid}/stream", params={"after": place})
            assert tokens(rest.text) == found[index:]
        everything = await client.get(f"/v1/requests/{rid}/stream")
    assert everything.text.encode() == reply.content


async def test_what_is_asked_reaches_the_scheduler(stage: Stage) -> None:
    asked = body(
        max_new_tokens=7, temperature=0.5, top_k=4, top_p=0.9, seed=11, stop=["blue"],
        repetition_penalty=1.5, frequency_penalty=0.25, truncate=2,
    )  # fmt: skip
    reply = await stage.http.post("/generate", json=asked)
    assert list(reply.json()) == ["generated_text"]
    spec = stage.scheduler.played[reply.headers["x-request-id"]].spec
    sampling = spec.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 4, 11)
    assert (sampling.temperature, sampling.frequency_penalty) == (0.5, 0.25)
    assert (list(sampling.stop), sampling.include_stop_str_in_output) == (["blue"], True)
    assert stage.preprocess.seen[-1].keep_last_tokens == 2
    plain = await stage.http.post("/", json={"inputs": INPUTS, "model": "dummy"})
    assert plain.json() == [{"generated_text": ANSWER}]
    spec = stage.scheduler.played[plain.headers["x-request-id"]].spec
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0, 100)


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Grammars, what they accept, and what they do not.
GRAMMARS: list[tuple[Any, str, str]] = [
    ({"type": "json", "value": SCHEMA}, '{"a": 1}', '{"a": "1"}'),
    ({"type": "json", "value": json.dumps(SCHEMA)}, '{"a": 1}', '{"b": 1}'),
    ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, '{"a": 1}', "[]"),
    ({"type": "regex", "value": "[0-9]+"}, "42", "4x"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS, ids=str)
async def test_a_grammar_holds_the_answer(stage: Stage, grammar: Any, good: str, bad: str) -> None:
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts
    for path in ("/", "/generate", "/generate_stream"):
        reply = await stage.http.post(path, json=body(grammar=grammar))
        assert reply.status_code == 200, reply.text
        written = stage.scheduler.played[reply.headers["x-request-id"]].spec.sampling.grammar
        assert accepts(written, good) and not accepts(written, bad)


async def test_a_grammar_of_the_client_of_hugging_face(stage: Stage) -> None:
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts
    grammar = TextGenerationInputGrammarType("json", SCHEMA)
    async with AsyncInferenceClient(model=stage.gateway.url) as client:
        await client.text_generation(INPUTS, grammar=grammar)
        assert [p async for p in await client.text_generation(INPUTS, grammar=grammar, stream=True)]
    found = [played.spec.sampling.grammar for played in stage.scheduler.played.values()]
    assert len(found) == 2
    for written in found:
        assert accepts(written, '{"a": 1}') and not accepts(written, "1")


async def test_a_stop_string_stays_in_the_text(stage: Stage) -> None:
    reply = await stage.http.post("/generate", json=body(stop=["circle"], details=True))
    content = reply.json()
    assert content["generated_text"] == "The red circle"
    assert content["details"]["finish_reason"] == "stop_sequence"
    assert "".join(token["text"] for token in content["details"]["tokens"]) == "The red circle"
    cut = await stage.http.post("/generate", json=body(max_new_tokens=2, details=True))
    assert cut.json()["details"]["finish_reason"] == "length"


async def test_images_stand_in_the_text_or_are_parts(stage: Stage) -> None:
    url = data_url(png(1, (28, 28)))
    written: list[Any] = [
        f"Look: ![a picture]({url}) what is it?",
        [{"text": "Look: "}, {"image": url}, {"type": "text", "text": " what is it?"}],
        [{"text": "Look: "}, {"image_url": {"url": url}}, {"text": " what is it?"}],
    ]
    for inputs in written:
        reply = await stage.http.post("/generate", json={"inputs": inputs})
        assert reply.status_code == 200, reply.text
        seen = stage.preprocess.seen[-1].conversation
        assert seen.as_prompt
        (message,) = seen.messages
        assert [part.WhichOneof("part") for part in message.content] == ["text", "media", "text"]
        assert message.content[1].media.data == png(1, (28, 28))
    inputs = [{"image": "/pictures/a b.png"}, {"text": "?"}]
    assert (await stage.http.post("/generate", json={"inputs": inputs})).status_code == 200
    (message,) = stage.preprocess.seen[-1].conversation.messages
    assert message.content[0].media.url == "file:///pictures/a%20b.png"


async def test_images_are_found_where_markdown_has_them(stage: Stage) -> None:
    url = "https://a.test/b.png"
    for inputs, texts in (
        (f"![x]({url})![ ![y]( {url} )", ["", "", ""]),
        (f"[x]({url}) ![a] b]({url}) ![c]({url}).", [f"[x]({url}) ![a] b]({url}) ", "."]),
        (f"![a ![b]({url}) ](]( ![c]({url}", ["", f" ](]( ![c]({url}"]),
    ):
        reply = await stage.http.post("/generate", json={"inputs": inputs})
        assert reply.status_code == 200, reply.text
        (message,) = stage.preprocess.seen[-1].conversation.messages
        parts = [part.text or part.media.url for part in message.content]
        expected = [part for text in texts for part in (text, url) if part][:-1]
        assert parts == expected
    many = await stage.http.post("/generate", json={"inputs": f"![]({url})" * 257})
    assert many.status_code == 400 and "256 images" in many.json()["error"]


def test_time_to_look_for_images_grows_with_the_text_alone() -> None:
    for text in ("![](" * 400_000, "![" * 400_000 + "](", "](" * 400_000, "![](x" * 400_000):
        # With the square of the length this would take an hour.
        assert [*split_at_images(text, "inputs")] == [(text, None)]


def test_images_are_those_of_the_pattern_of_tgi() -> None:
    draw = random.Random(5)
    pattern = re.compile(r"!\[[^\]]*\]\(([^)]*)\)")
    for _ in range(5000):
        text = "".join(draw.choices("![]()a", k=draw.randrange(24)))
        found = [one for pair in split_at_images(text, "inputs") for one in pair][:-1]
        assert found == pattern.split(text), text


async def test_info_names_the_model(stage: Stage) -> None:
    found = (await stage.http.get("/info")).json()
    assert (found["model_id"], found["max_total_tokens"]) == ("tiny-vl", 512)
    assert found["model_pipeline_tag"] == "image-text-to-text"


REFUSED: list[tuple[Any, str]] = [
    ({}, "inputs"),
    ({"inputs": 3}, "inputs"),
    ({"inputs": []}, "inputs"),
    ({"inputs": [{"text": "a", "image": "/b"}]}, "inputs[0]"),
    ({"inputs": "![](ftp://a/b.png)"}, "inputs"),
    (body(typical_p=0.5), "parameters.typical_p"),
    (body(watermark=True), "parameters.watermark"),
    (body(grammar={"type": "xml", "value": {}}), "parameters.grammar.type"),
    (body(grammar={"value": {}}), "parameters.grammar.type"),
    (body(grammar="json"), "parameters.grammar"),
    (body(grammar={"type": "json"}), "parameters.grammar.value"),
    (body(grammar={"type": "json", "value": 3}), "parameters.grammar.value:"),
    (body(grammar={"type": "json", "value": {"type": "bird"}}), "parameters.grammar.value:"),
    (body(grammar={"type": "json_schema", "value": []}), "parameters.grammar.value"),
    (body(grammar={"type": "json_schema", "value": {}}), "parameters.grammar.value.schema"),
    (body(grammar={"type": "regex", "value": 3}), "parameters.grammar.value"),
    (body(grammar={"type": "regex", "value": ""}), "parameters.grammar.value"),
    (body(grammar={"type": "regex", "value": "("}), "parameters.grammar.value:"),
    (body(adapter_id="a"), "parameters.adapter_id"),
    (body(temperature=0), "parameters.temperature"),
    (body(temperature=5), "parameters.temperature"),
    (body(max_new_tokens=0), "parameters.max_new_tokens"),
    (body(max_new_tokens=1.5), "parameters.max_new_tokens"),
    (body(max_new_tokens=9999), "parameters.max_new_tokens"),
    (body(top_n_tokens=2), "parameters.top_n_tokens"),
    (body(top_n_tokens=99, details=True), "parameters.top_n_tokens"),
    (body(decoder_input_details=True), "parameters.decoder_input_details"),
    (body(best_of=0), "parameters.best_of"),
    (body(truncate=0), "parameters.truncate"),
    (body(stop=[""]), "parameters.stop"),
    (body(seed="x"), "parameters.seed"),
    ({"inputs": INPUTS, "parameters": []}, "parameters"),
]


@pytest.mark.parametrize(("content", "field"), REFUSED, ids=str)
async def test_what_is_wrong_is_named_in_the_form_of_tgi(
    stage: Stage, content: Any, field: str
) -> None:
    reply = await stage.http.post("/", json=content)
    error = reply.json()
    assert (reply.status_code, set(error)) == (400, {"error", "error_type"})
    assert error["error_type"] == "validation" and error["error"].startswith(f"{field} ")
    assert not stage.scheduler.played


async def test_other_errors_in_the_form_of_tgi(stage: Stage) -> None:
    for raw in (b"", b"[]", b"{", b"\xff"):
        reply = await stage.http.post("/generate_stream", content=raw)
        assert (reply.status_code, reply.json()["error_type"]) == (400, "validation")
    reply = await stage.http.get("/generate")
    assert (reply.status_code, reply.json()["error_type"]) == (405, "validation")
    reply = await stage.http.get("/info/more")
    assert (reply.status_code, reply.json()["error_type"]) == (404, "not_found")
    reply = await stage.http.post("/", json={"inputs": INPUTS, "model": "another"})
    assert (reply.status_code, reply.json()["error_type"]) == (404, "not_found")
    assert "<html" in (await stage.http.get("/")).text


async def test_an_error_inside_a_stream(stage: Stage) -> None:
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("The red").ids]
    stage.scheduler.failure = Unavailable("BAD_LUCK", "it broke").to_failure()
    reply = await stage.http.post("/generate_stream", json=body())
    assert tokens(reply.text)[-1] == {"error": "it broke", "error_type": "generation"}


async def test_a_client_that_leaves_ends_its_request(stage: Stage) -> None:
    go = asyncio.Semaphore(3)

    async def step(rid: str, index: int) -> None:
        await go.acquire()

    stage.scheduler.step = step
    async with stage.http.stream("POST", "/generate_stream", json=body()) as reply:
        rid = reply.headers["x-request-id"]
        async for _ in reply.aiter_lines():
            break
    for _ in range(100):
        go.release()
    played = await stage.scheduler.taken(rid)
    async with asyncio.timeout(60):
        await played.ended.wait()
    assert played.cancelled
