"""The routes for vectors and scores, as clients see them."""

import base64
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from shared.queue.token_log import decode_tokens
from tessera.common.v1.ending_pb2 import Failure
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.fuzz import bodies
from tests.fuzz.right import vectors
from tests.support.gateway.pooled_stages import (
    Opened,
    classifies_of,
    embeds_of,
    numbers_of,
    scores_of,
)
from tests.support.gateway.stage import MODEL, Stage
from tests.support.pictures import data_url, png


def unit(vector: Sequence[float]) -> list[float]:
    found: list[float] = (np.asarray(vector) / np.linalg.norm(vector)).tolist()
    return found


async def refused(stage: Stage, path: str, **body: Any) -> dict[str, Any]:
    reply = await stage.http.post(path, json={"model": MODEL, **body})
    assert reply.status_code == 400, reply.text
    error: Any = reply.json()["error"]
    return {"message": error} if isinstance(error, str) else error


async def test_the_openai_client_gets_the_same_numbers_in_both_encodings(embeds: Stage) -> None:
    inputs = [f"text {'x' * n}" for n in range(7)]  # more than are pooled at a time
    create = embeds.openai.embeddings.create
    by_default = await create(model=MODEL, input=inputs)  # as base64
    as_floats = await create(model=MODEL, input=inputs, encoding_format="float")
    specs = {decode_text(embeds, p.spec): p.spec for p in embeds.scheduler.played.values()}
    wanted = [unit(numbers_of(specs[text])) for text in inputs]
    for reply in (by_default, as_floats):
        assert [one.index for one in reply.data] == list(range(7))
        for one, vector in zip(reply.data, wanted, strict=True):
            assert one.embedding == pytest.approx(vector, abs=1e-6)
        tokens = sum(len(embeds.tokenizer.encode(text).ids) for text in inputs)
        assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (tokens, tokens)
    assert as_floats.data[3].embedding == by_default.data[3].embedding
    assert len({tuple(one.embedding) for one in as_floats.data}) > 1


def decode_text(stage: Stage, spec: RequestSpec) -> str:
    text: str = stage.tokenizer.decode(decode_tokens(spec.prompt))
    return text


async def test_token_ids_and_cut_vectors(embeds: Stage) -> None:
    create = embeds.openai.embeddings.create
    ids = embeds.tokenizer.encode("some words").ids
    text = await create(model=MODEL, input="some words", dimensions=4)
    one = await create(model=MODEL, input=ids, dimensions=4)
    several = await create(model=MODEL, input=[ids, ids[:1]], dimensions=4)
    assert len(text.data[0].embedding) == 4
    assert np.linalg.norm(text.data[0].embedding) == pytest.approx(1)
    assert text.data[0].embedding == one.data[0].embedding == several.data[0].embedding
    body = {"model": MODEL, "input": "some words", "normalize": False, "encoding_format": "base64"}
    raw = (await embeds.http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
    [spec] = [
        p.spec for p in embeds.scheduler.played.values() if decode_tokens(p.spec.prompt) == ids
    ][:1]
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == numbers_of(spec)
    pooled = await embeds.http.post("/pooling", json={**body, "encoding_format": None})
    assert pooled.json()["data"][0] == {"object": "pooling", "index": 0, "data": numbers_of(spec)}


async def test_what_is_wrong_with_an_input_names_it(embeds: Stage) -> None:
    long = "many different words " * 60
    for body, field, said in (
        ({}, "input", "is missing"),
        ({"input": []}, "input", "at least one"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], [99_999]]}, "input[1][0]", "must be between"),
        ({"input": [1, "a"]}, "input[1]", "whole number"),
        ({"input": "a", "dimensions": 5}, "dimensions", "one of 4"),
        ({"input": "a", "dimensions": 9}, "dimensions", "between 1 and 8"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "prompt_name": "other"}, "prompt_name", "query, document"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "messages"),
        ({"input": [[1] * 70]}, "input[0]", "a prompt may have 63"),
        ({"input": ["a", "b", "c", "d", [1] * 70]}, "input[4]", "input[4]: This model"),
        ({"input": [1] * 70}, "input", "a prompt may have 63"),
    ):
        error = await refused(embeds, "/v1/embeddings", **body)
        assert error["param"] == field, (body, error)
        assert said in error["message"], error
    kept = {"input": [[5] * 70], "truncate_prompt_tokens": 3}
    reply = await embeds.http.post("/v1/embeddings", json={"model": MODEL, **kept})
    assert reply.json()["usage"]["prompt_tokens"] == 3
    error = await refused(embeds, "/api/embed", input=["a", long], truncate=False)
    assert "input[1]" in error["message"] or "64" in error["message"]
    missing = await embeds.http.post("/v1/embeddings", json={"model": "x", "input": "a"})
    assert missing.status_code == 404


async def test_ollamas_routes(embeds: Stage) -> None:
    both = await embeds.http.post("/api/embed", json={"model": MODEL, "input": ["one", "two"]})
    found = both.json()
    assert [np.linalg.norm(v) == pytest.approx(1) for v in found["embeddings"]] == [True, True]
    assert found["prompt_eval_count"] > 1 and found["total_duration"] > 0
    older = await embeds.http.post("/api/embeddings", json={"model": MODEL, "prompt": "one"})
    assert unit(older.json()["embedding"]) == pytest.approx(found["embeddings"][0], abs=1e-6)
    empty = await embeds.http.post("/api/embed", json={"model": MODEL, "input": ""})
    assert empty.json() == {"model": MODEL, "embeddings": []}
    shown = await embeds.http.post("/api/show", json={"model": MODEL})
    assert shown.json()["capabilities"] == ["embedding"]


async def test_texts_are_ranked_by_how_alike_vectors_are(embeds: Stage) -> None:
    documents = ["a", "the red circle", "two small dogs and a cat"]
    body = {"model": MODEL, "query": "the red circle", "documents": documents}
    ranked = (await embeds.http.post("/v1/rerank", json=body)).json()
    every = (await embeds.http.post("/v1/rerank", json=body | {"top_n": 0})).json()
    assert every["results"] == ranked["results"]
    score = {"model": MODEL, "text_1": "the red circle", "text_2": documents}
    values = [d["score"] for d in (await embeds.http.post("/score", json=score)).json()["data"]]
    order = sorted(range(3), key=lambda index: -values[index])
    assert [one["index"] for one in ranked["results"]] == order
    for one in ranked["results"]:
        assert one["relevance_score"] == values[one["index"]]
        assert one["document"] == {"text": documents[one["index"]]}
    texts = {decode_text(embeds, p.spec) for p in embeds.scheduler.played.values()}
    assert texts == {"Q: the red circle", *(f"D: {document}" for document in documents)}
    pairs = {"model": MODEL, "queries": ["a", "b"], "documents": ["c", "d"]}
    assert len((await embeds.http.post("/v1/score", json=pairs)).json()["data"]) == 2
    pairs["documents"] = ["c", "d", "e"]
    assert (await refused(embeds, "/score", **pairs))["param"] == "queries"


async def test_queries_and_texts_have_the_names_that_vllm_gives_them(embeds: Stage) -> None:
    found = []
    pairs = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))  # fmt: skip
    for queries, documents in pairs:
        body = {queries: "a", documents: ["b", "c"]}
        reply = await embeds.http.post("/score", json=body)
        found.append([one["score"] for one in reply.json()["data"]])
        assert (await refused(embeds, "/score", **{queries: "a"}))["param"] in (
            documents,
            "documents",
        )
    assert len(found[0]) == 2 and all(one == found[0] for one in found)
    mixed = await refused(embeds, "/score", queries="a", data_2="b")
    assert mixed["param"] == "data_2" and "queries and items" in mixed["message"]


async def test_a_classifier_names_labels(classifies: Stage) -> None:
    reply = await classifies.http.post("/classify", json={"model": MODEL, "input": ["a", "b"]})
    for one in reply.json()["data"]:
        assert (one["label"], one["num_classes"]) == ("good", 2)
        assert one["probs"] == pytest.approx([0.119203, 0.880797], abs=1e-6)
    raw = {"input": "a", "use_activation": False}
    reply = await classifies.http.post("/pooling", json=raw)
    assert reply.json()["data"][0]["data"] == [1.0, 3.0]
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/pooling", {"input": "a", "task": "embed"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        error = await refused(classifies, path, **body)
        assert (error["code"], error["message"][:30]) == (
            "task_not_served",
            "this server classifies texts: ",
        )


async def test_options_of_media_go_on_with_a_conversation(embeds: Stage) -> None:
    shown = {"type": "image_url", "image_url": {"url": data_url(png(1, (28, 28)))}}
    body = {"messages": [{"role": "user", "content": [shown]}]}
    options = {"mm_processor_kwargs": {"max_pixels": 401408}, "media_io_kwargs": {}}
    reply = await embeds.http.post("/v1/embeddings", json={**body, **options})
    assert reply.status_code == 200, reply.text
    [seen] = embeds.preprocess.seen
    assert json.loads(seen.media_options.mm_processor_kwargs_json) == {"max_pixels": 401408}
    error = await refused(embeds, "/v1/embeddings", **body, mm_processor_kwargs=[])
    assert error["param"] == "mm_processor_kwargs"


async def test_a_scorer_reads_both_texts_as_the_tokenizer_pairs_them(scores: Stage) -> None:
    documents = ["longer than the others are", "short", {"text": "in the middle"}]
    body = {"query": "which?", "documents": documents, "top_n": 2, "return_documents": False}
    reply = (await scores.http.post("/v2/rerank", json=body)).json()
    assert [one["index"] for one in reply["results"]] == [0, 2]
    assert all("document" not in one for one in reply["results"])
    prepared = [(p.text, p.text_pair) for p in scores.preprocess.seen]
    assert ("which?", "in the middle") in prepared
    assert (await refused(scores, "/rerank", query="a", documents=["a", ""]))["param"] == (
        "documents[1]"
    )
    told = await refused(scores, "/rerank", query="a", documents=["a"], instruction="x")
    assert told["param"] == "instruction"


async def test_a_server_that_generates_says_how_vectors_are_served(stage: Stage) -> None:
    error = await refused(stage, "/v1/embeddings", input="a")
    assert error["code"] == "task_not_served" and "--task" in error["message"]
    error = await refused(stage, "/api/embed", input="a")
    assert "this server generates text" in error["message"]
    error = await refused(stage, "/pooling", input="a")
    assert "for one that gives vectors or scores, start it" in error["message"]
    models = (await stage.http.get("/v1/models")).json()
    assert models["data"][0]["tasks"] == ["generate"]


async def test_a_vector_is_a_request_with_a_state_and_no_stream(embeds: Stage) -> None:
    headers = {"idempotency-key": "one"}
    body = {"model": MODEL, "input": "some words"}
    replies = [
        await embeds.http.post("/v1/embeddings", json=body, headers=headers) for _ in range(2)
    ]
    first, second = (reply.json()["data"] for reply in replies)
    assert first == second and len(embeds.scheduler.played) == 1
    [rid] = embeds.scheduler.played
    state = (await embeds.http.get(f"/v1/requests/{rid}")).json()
    assert state["status"] == "completed" and state["usage"]["completion_tokens"] == 0
    stream = await embeds.http.get(f"/v1/requests/{rid}/stream")
    assert (stream.status_code, stream.json()["error"]["code"]) == (400, "no_stream")
    page = (await embeds.http.get("/metrics")).text
    count = len(embeds.tokenizer.encode("some words").ids)
    label = f'{{engine="0",model_name="{MODEL}"}}'
    assert f"vllm:prompt_tokens_total{label} {float(count)}" in page
    assert f"vllm:generation_tokens_total{label} 0.0" in page


async def test_a_failure_of_one_text_fails_the_reply(embeds: Stage) -> None:
    embeds.scheduler.failure = Failure(code=13, reason="NAN_LOGITS", message="not a number")
    with pytest.raises(openai.InternalServerError):
        await embeds.openai.embeddings.create(model=MODEL, input=["a", "b"])


@pytest.mark.parametrize("served", [embeds_of, classifies_of, scores_of])
async def test_strange_bodies_are_answered(
    served: Callable[..., Opened], redis_url: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    draw, kind = random.Random(7), {"content-type": "application/json"}
    async with served(redis_url, tmp_path / MODEL, tokenizer) as stage:
        for route in vectors.ROUTES:
            for _ in range(6):
                content = bodies.body(draw, route).replace(b'"fuzzed"', b'"tiny-vl"')
                reply = await stage.http.post(route, content=content, headers=kind)
                assert reply.status_code in (200, 400, 404), (route, content, reply.text)
