"""What a model is served for, by its files and by `--task` and `--pooling`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.gateway.model.pooled_files import read_pooled
from services.gateway.model.pooled_model import PooledModel, Task, tasks_of
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.tokenizer_file import read_tokenizer
from tessera.common.v1.pooling_pb2 import PooledRows, PoolingHead
from tests.support.tokenizers import byte_level_tokenizer, save

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LAST, MEAN = PooledRows.POOLED_ROWS_LAST, PooledRows.POOLED_ROWS_MEAN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a text model of 64 numbers."""
    words = byte_level_tokenizer()
    words.add_tokens(["yes", "no"])
    save(words, tmp_path)
    return written(tmp_path)


def written(folder: Path, architecture: str = "Qwen3ForCausalLM", **config: Any) -> Path:
    content = {"architectures": [architecture], "model_type": "qwen3", "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({**content, **config}))
    return folder


def with_modules(folder: Path, pooling: Mapping[str, Any], *modules: Mapping[str, str]) -> Path:
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, *modules]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def read(folder: Path, task: str = "auto", pooling: str = "auto") -> PooledModel | None:
    words = read_tokenizer(folder / "tokenizer.json")
    return read_pooled(Checkpoint(folder), words, 64, task, pooling)


def found(folder: Path, task: str = "auto", pooling: str = "auto") -> PooledModel:
    pooled = read(folder, task, pooling)
    assert pooled is not None
    return pooled


def test_a_model_that_generates_gives_vectors_where_it_is_asked_to(folder: Path) -> None:
    assert read(folder) is None and read(folder, "generate") is None
    assert tasks_of(None) == (Task.GENERATE,)
    pooled = found(folder, "embed")
    assert (pooled.params.rows, pooled.width, pooled.normalizes) == (LAST, 64, True)
    assert tasks_of(pooled) == (Task.EMBED, Task.SCORE)
    assert found(folder, "embed", "mean").params.rows == MEAN


def test_the_files_of_sentence_transformers_decide(folder: Path) -> None:
    with_modules(
        folder, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, POOLING
    )
    pooled = found(folder)
    assert (pooled.task, pooled.params.rows, pooled.normalizes) == (Task.EMBED, MEAN, False)
    with_modules(folder, {"pooling_mode_lasttoken": True}, POOLING, NORMALIZE)
    assert (found(folder).params.rows, found(folder).normalizes) == (LAST, True)
    with_modules(folder, {"pooling_mode": "mean"}, POOLING)
    assert found(folder).params.rows == MEAN
    assert found(folder, pooling="last").params.rows == LAST
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    pooled = found(folder)
    assert pooled.default_prompt == "Q: "
    assert pooled.prompt_of("passage", "document") == ""
    assert read(folder, "generate") is None


@pytest.mark.parametrize(
    ("pooling", "modules", "said"),
    [
        ({"pooling_mode_cls_token": True}, [POOLING], "last token and of the mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, [POOLING], "one at a"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, [POOLING], "include_prompt"),
        ({}, [POOLING, {"path": "3", "type": "models.Dense"}], "Dense is not served"),
        ({}, [{"path": "3"}], "modules.json cannot be read"),
    ],
)
def test_what_the_files_ask_for_and_is_not_served_is_refused(
    folder: Path, pooling: Mapping[str, Any], modules: list[Mapping[str, str]], said: str
) -> None:
    with_modules(folder, pooling, *modules)
    with pytest.raises(InvalidRequest, match=said):
        read(folder)


def test_a_classifier_has_its_labels_and_the_activation_of_pipelines(folder: Path) -> None:
    name = "Qwen3ForSequenceClassification"
    written(folder, name, id2label={"0": "bad", "1": "good"})
    pooled = found(folder)
    assert (pooled.task, pooled.labels) == (Task.CLASSIFY, ("bad", "good"))
    assert pooled.params.head == PoolingHead.POOLING_HEAD_SCORE and pooled.width == 2
    assert tasks_of(pooled) == (Task.CLASSIFY,)
    logits = np.array([1.0, 3.0], np.float32)
    assert pooled.finished(logits, 2).tolist() == pytest.approx([0.119203, 0.880797], abs=1e-6)
    written(folder, name, num_labels=1)
    assert tasks_of(found(folder)) == (Task.CLASSIFY, Task.SCORE)
    assert found(folder).score(logits[:1]) == pytest.approx(0.731059, abs=1e-6)
    written(folder, name, num_labels=1, problem_type="regression")
    assert found(folder, "score").score(logits[1:]) == 3.0
    written(folder, name, num_labels=2, problem_type="multi_label_classification")
    assert found(folder).finished(logits, 2)[1] == pytest.approx(0.952574, abs=1e-6)
    with pytest.raises(InvalidRequest, match="2 labels"):
        read(folder, "score")
    with pytest.raises(InvalidRequest, match="classification head alone"):
        read(folder, "embed")


def test_a_reranker_that_generates_is_asked_for_yes_and_no(folder: Path, tmp_path: Path) -> None:
    pooled, ids = found(folder, "score"), read_tokenizer(folder / "tokenizer.json").ids()
    assert list(pooled.params.token_ids) == [ids["no"], ids["yes"]]
    assert pooled.score(np.array([1.0, 3.0], np.float32)) == pytest.approx(0.880797, abs=1e-6)
    other = tmp_path / "other"
    other.mkdir()
    written(other)
    save(byte_level_tokenizer(), other)
    with pytest.raises(InvalidRequest, match="no token 'no'"):
        read(other, "score")
    with pytest.raises(InvalidRequest, match="no classification head"):
        read(folder, "classify")
    with pytest.raises(InvalidRequest, match="--pooling mean is for --task embed"):
        read(folder, "score", "mean")


def test_vectors_may_be_cut_where_the_configuration_says_so(folder: Path) -> None:
    assert found(folder, "embed").matryoshka is None
    written(folder, is_matryoshka=True)
    assert found(folder, "embed").matryoshka == ()
    written(folder, matryoshka_dimensions=[16, 32])
    assert found(folder, "embed").matryoshka == (16, 32)
    written(folder, matryoshka_dimensions=[128])
    with pytest.raises(InvalidRequest, match="from 1 to 64"):
        read(folder, "embed")


def test_a_layer_stack_alone_is_for_vectors(folder: Path) -> None:
    assert found(written(folder, "Qwen3Model")).task is Task.EMBED
