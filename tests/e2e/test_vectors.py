"""Vectors and scores by all services together are those of transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import ollama
import pytest
import torch
from openai import BadRequestError, OpenAI
from PIL import Image
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from tessera.gateway.v1.vectors_pb2 import PoolInput, PoolRequest, RerankRequest
from tessera.gateway.v1.vectors_pb2_grpc import VectorServiceStub
from tests.support.checkpoints import load_reference, make_checkpoint, reference_inputs
from tests.support.checkpoints.options import CheckpointOptions, randomise, text_config, tokenizer
from tests.support.pictures import data_url, png
from tests.support.processes.services_in_process import services_in_process

pytestmark = pytest.mark.timeout(300)
# The last one has more tokens than a step.
TEXTS = ["What is in the picture?", "two small dogs", "红色的圆形", "a cat and a dog, " * 60]
QUERY = "What is there?"

Floats = npt.NDArray[np.float32]


def save(
    folder: Path, kind: type[PreTrainedModel], words: PreTrainedTokenizerFast, **config: Any
) -> Path:
    """A small random Qwen3 of another class than the one that generates, or with another tokenizer."""
    made = text_config("qwen3", CheckpointOptions(text=config), words)
    model: Any = kind(made)
    randomise(model, 3)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def as_sentence_transformer(folder: Path) -> Path:
    """Gives a folder the files that say how its vectors are made: the mean of all tokens, of length 1."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


@torch.inference_mode()
def hidden_rows(model: Any, **inputs: torch.Tensor) -> Floats:
    """[tokens, hidden] behind the last norm."""
    found: Floats = model.model(**inputs).last_hidden_state[0].numpy()
    return found


def unit(vector: Floats) -> Floats:
    found: Floats = vector / np.linalg.norm(vector)
    return found


def test_vectors_of_texts_are_the_means_of_hidden_states(tmp_path: Path, redis_url: str) -> None:
    folder = as_sentence_transformer(make_checkpoint(tmp_path / "tiny", "qwen3"))
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    model = load_reference(folder)

    def expected(text: str) -> Floats:
        ids = words(text, return_tensors="pt")["input_ids"]
        return unit(hidden_rows(model, input_ids=ids).mean(0))

    with (
        services_in_process(folder, redis_url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        create = client.embeddings.create
        # The client asks for base64 unless told otherwise.
        replies = [create(model="tiny", input=TEXTS)]
        replies.append(create(model="tiny", input=TEXTS, encoding_format="float"))
        for reply in replies:
            found = [item.embedding for item in reply.data]
            np.testing.assert_allclose(found, [expected(text) for text in TEXTS], atol=2e-6)
        counts = [len(words(text)["input_ids"]) for text in TEXTS]
        assert replies[0].usage.prompt_tokens == sum(counts) and max(counts) > 272
        ids = create(model="tiny", input=words(TEXTS[0])["input_ids"])
        assert ids.data[0].embedding == replies[0].data[0].embedding
        root = system.base_url.removesuffix("/v1")
        with ollama.Client(root, timeout=60) as other:
            given = other.embed("tiny", TEXTS[:2]).embeddings
        assert given == [item.embedding for item in replies[0].data[:2]]
        body = {"query": QUERY, "documents": TEXTS}
        ranked = httpx.post(f"{root}/v1/rerank", json=body, timeout=60).json()["results"]
        query = expected("Find: " + QUERY)
        alike = {index: float(query @ expected(text)) for index, text in enumerate(TEXTS)}
        assert [one["index"] for one in ranked] == sorted(alike, key=lambda index: -alike[index])
        for one in ranked:
            assert one["relevance_score"] == pytest.approx(alike[one["index"]], abs=1e-5)
        with grpc.insecure_channel(system.grpc_address) as channel:
            stub = VectorServiceStub(channel)
            inputs = [PoolInput(text=text) for text in TEXTS]
            *vectors, usage = stub.Pool(PoolRequest(input=inputs), timeout=60)
            ranking = stub.Rerank(RerankRequest(query=QUERY, documents=TEXTS), timeout=60)
        assert [list(one.vector.values) for one in vectors] == [
            item.embedding for item in replies[1].data
        ]
        assert usage.usage.prompt_tokens == sum(counts)
        assert [(one.index, one.relevance_score) for one in ranking.results] == [
            (one["index"], one["relevance_score"]) for one in ranked
        ]
        with pytest.raises(BadRequestError, match="gives vectors of texts"):
            client.completions.create(model="tiny", prompt="a")


def test_a_picture_takes_part_in_a_vector(tmp_path: Path, redis_url: str) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen2_vl")
    picture = png(3, (112, 84))
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}},
        {"type": "text", "text": "a square"},
    ]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    with services_in_process(folder, redis_url, task="embed") as system:
        reply = httpx.post(f"{system.base_url}/embeddings", json=body, timeout=60)
    rendered = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>a square<|im_end|>\n"
    )
    (tmp_path / "picture.png").write_bytes(picture)
    with Image.open(tmp_path / "picture.png") as opened:
        inputs = reference_inputs(folder, rendered, [opened])
    rows = hidden_rows(load_reference(folder), **inputs)
    assert reply.json()["usage"]["prompt_tokens"] == len(rows)
    found = reply.json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, unit(rows[-1]), atol=1e-5)


@torch.inference_mode()
def test_classes_are_those_of_the_classification_head(tmp_path: Path, redis_url: str) -> None:
    words, labels = tokenizer(), {0: "bad", 1: "fair", 2: "good"}
    kind = Qwen3ForSequenceClassification
    folder = save(tmp_path / "tiny", kind, words, id2label=labels, tie_word_embeddings=False)
    model = kind.from_pretrained(folder).eval()
    with services_in_process(folder, redis_url) as system:
        root = system.base_url.removesuffix("/v1")
        reply = httpx.post(f"{root}/classify", json={"input": TEXTS}, timeout=60).json()
    for text, one in zip(TEXTS, reply["data"], strict=True):
        logits = model(input_ids=words(text, return_tensors="pt")["input_ids"]).logits[0]
        np.testing.assert_allclose(one["probs"], logits.softmax(-1).numpy(), atol=1e-6)
        assert one["label"] == labels[int(logits.argmax())]


@torch.inference_mode()
def test_a_model_that_answers_scores_by_yes_and_no(tmp_path: Path, redis_url: str) -> None:
    words = tokenizer()
    words.add_tokens(["yes", "no"])
    folder = save(tmp_path / "tiny", Qwen3ForCausalLM, words)
    model = load_reference(folder)
    with services_in_process(folder, redis_url, task="score") as system:
        body = {"query": QUERY, "documents": TEXTS[:3]}
        reply = httpx.post(f"{system.base_url}/rerank", json=body, timeout=60).json()
    ranked = reply["results"]
    scores = [one["relevance_score"] for one in ranked]
    assert scores == sorted(scores, reverse=True)
    yes_or_no = words.convert_tokens_to_ids(["no", "yes"])
    told = 'Note that the answer can only be "yes" or "no".'
    system_text = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct"
        f" provided. {told}"
    )
    asked = "Given a web search query, retrieve relevant passages that answer the query"
    for one in ranked:
        document = TEXTS[one["index"]]
        text = f"<Instruct>: {asked}\n<Query>: {QUERY}\n<Document>: {document}"
        turns = [{"role": "system", "content": system_text}, {"role": "user", "content": text}]
        rendered = words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = words(rendered, return_tensors="pt")["input_ids"]
        expected = model(input_ids=ids).logits[0, -1, yes_or_no].softmax(-1)[1]
        assert one["relevance_score"] == pytest.approx(float(expected), abs=1e-6)
