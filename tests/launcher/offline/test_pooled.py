"""`LLM.embed`, `score` and `classify`: the vectors and classes of transformers' own classes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForSequenceClassification

from services.launcher.offline.requests.pooled import read_pairs, read_pooled
from tessera import LLM, RequestRefused
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.checkpoints.options import CheckpointOptions, randomise, text_config, tokenizer
from tests.support.preprocess.service import picture

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("offline-pooled")]

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2_vl")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[LLM]:
    with LLM(folder, task="embed", dtype="float32", max_model_len=512) as running:
        yield running


@torch.inference_mode()
def vector(folder: Path, ids: list[int]) -> Floats:
    """The last row behind the last norm, of length 1."""
    model: Any = load_reference(folder)
    rows: Floats = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
    found: Floats = rows[-1] / np.linalg.norm(rows[-1])
    return found


def test_prompts_of_all_kinds_have_vectors_in_their_order(
    embedder: LLM, folder: Path, tmp_path: Path
) -> None:
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = ["a red circle", "two small dogs", "红色的圆形"]
    ids = words(texts[1])["input_ids"]
    found = embedder.embed([texts[0], ids, {"prompt": texts[2]}, texts[0]])
    assert len({one.request_id for one in found}) == 4
    for one, text in zip(found, [*texts, texts[0]], strict=True):
        assert one.finished and one.outputs.hidden_size == 64
        expected = vector(folder, words(text)["input_ids"])
        np.testing.assert_allclose(one.outputs.embedding, expected, atol=1e-5)
    (single,) = embedder.embed(texts[0], normalize=False)
    assert np.linalg.norm(single.outputs.embedding) != pytest.approx(1)
    picture(56, 56, 3).save(tmp_path / "a.png")
    said = {"role": "user", "content": [{"image": tmp_path / "a.png"}, {"text": "a square"}]}
    unseen = {"role": "user", "content": [{"text": "a square"}]}
    seen, alone, blind = embedder.embed([[said], texts[0], [unseen]])
    assert seen.outputs != blind.outputs
    assert alone.outputs.embedding == found[0].outputs.embedding
    assert embedder.embed([]) == []


def test_texts_are_scored_by_how_alike_vectors_are(embedder: LLM) -> None:
    texts = ["a", "the red circle", "two dogs"]
    vectors = [np.asarray(one.outputs.embedding) for one in embedder.embed(texts)]
    scores = [one.outputs.score for one in embedder.score(texts[0], texts[1:])]
    assert scores == pytest.approx([float(vectors[0] @ other) for other in vectors[1:]], abs=1e-5)
    pairs = [one.outputs.score for one in embedder.score(texts, texts)]
    assert pairs == pytest.approx([1, 1, 1], abs=1e-5)


def test_what_cannot_be_pooled_is_refused_by_its_number(embedder: LLM) -> None:
    with pytest.raises(RequestRefused, match=r"^prompts\[3\] must not be empty"):
        embedder.embed(["a", [1, 2], "b", "", "c"])
    with pytest.raises(RequestRefused, match=r"prompts\[1\]\[0\] must be between"):
        embedder.embed(["a", [1 << 30]])
    with pytest.raises(RequestRefused, match="dimensions"):
        embedder.embed("a", dimensions=3)
    with pytest.raises(RequestRefused, match="this server gives vectors"):
        embedder.classify("a")
    with pytest.raises(RequestRefused, match="this server gives vectors"):
        embedder.generate("a")
    with pytest.raises(ValueError, match="data_1 must be one text"):
        embedder.score(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="conversation"):
        embedder.embed({"prompt": "a", "multi_modal_data": {"image": "https://a.org/a.png"}})
    with pytest.raises(TypeError, match="data_2"):
        embedder.score("a", [1])
    assert len(embedder.embed("a")) == 1


def test_many_prompts_are_several_requests() -> None:
    texts = [f"text {number}" for number in range(2500)]
    asked = read_pooled([*texts, [1, 2], "x"])
    assert [(one.start, one.count) for one in asked] == [
        (0, 1024), (1024, 1024), (2048, 452), (2500, 1), (2501, 1),
    ]  # fmt: skip
    assert [text for one in asked[:3] for text in one.body["input"]] == texts
    assert asked[1].renamed("input[6] must not be empty") == "prompts[1030] must not be empty"
    assert asked[3].renamed("input[0][1] must be") == "prompts[2500][1] must be"
    assert asked[0].renamed("dimensions asks") == "dimensions asks"
    pairs = read_pairs("q", texts)
    assert [one.body["queries"] for one in pairs] == [["q"]] * 3
    assert [text for one in read_pairs(texts, texts) for text in one.body["queries"]] == texts


@pytest.mark.full
@torch.inference_mode()
def test_classes_are_those_of_the_classification_head(tmp_path: Path) -> None:
    words, labels = tokenizer(), {0: "bad", 1: "fair", 2: "good"}
    made: Any = Qwen3ForSequenceClassification(
        text_config(
            "qwen3", CheckpointOptions(text={"id2label": labels, "tie_word_embeddings": False}), words
        )
    )  # fmt: skip
    randomise(made, 3)
    made.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    model = made.eval()
    texts = ["What is there?", "two small dogs"]
    with LLM(tmp_path, dtype="float32") as llm:
        classes = llm.classify(texts)
        raw = llm.classify(texts[0], use_activation=False)[0].outputs
    for text, one in zip(texts, classes, strict=True):
        logits = model(input_ids=words(text, return_tensors="pt")["input_ids"]).logits[0]
        np.testing.assert_allclose(one.outputs.probs, logits.softmax(-1).numpy(), atol=1e-6)
        assert one.outputs.label == labels[int(logits.argmax())] and one.outputs.num_classes == 3
    logits = model(input_ids=words(texts[0], return_tensors="pt")["input_ids"]).logits[0]
    np.testing.assert_allclose(raw.probs, logits.numpy(), atol=1e-4)
