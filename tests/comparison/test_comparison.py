"""Prompts with pictures against the class's own forward, before a model is served."""

import dataclasses
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.comparison import compare as comparing
from services.comparison import prompts
from services.comparison.compare import compare
from services.families import registry
from services.families.blip2.prompt import Blip2Rule
from services.families.comparison import Comparison, compares_pictures, has_comparison
from services.families.fuyu.encoder import FuyuEncoder
from services.preprocess.prompt.tokenizer import Ids
from services.vision_encoder.towers.encoder import Item
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tests.reference_models import deepseek_vl2
from tests.support.checkpoints import GENERIC, make_checkpoint
from tests.support.processes.loud_libraries import make_loud
from tests.support.released_folders import edited

BY_DEFAULT = ("ovis2", "blip2")
# With a prompt rule, and all but BLIP-2 with an encoder, of their own: their decoders run by the code of transformers.
RULES = ("blip2", "fuyu", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl")
# What each does beside the generic parts, and how far a prompt is off without that.
OWN = {"ovis2": ("features", "rows"), "ernie4_5_vl_moe": ("prompt_marks",), "molmo2": ("merge",)}


def marked(names: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full) for name in names
    ]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are prepared in this process, with the records that the test has."""
    monkeypatch.setattr(comparing, "_prepare", lambda checkpoint, file: prompts.prepare(checkpoint))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, tuple[str, ...]], None]:
    """Takes overrides of a folder's record away."""
    before = dict(registry._by_folder())

    def change(name: str, overrides: tuple[str, ...]) -> None:
        record = before[name]
        kept = {key: record.overrides[key] for key in record.overrides if key not in overrides}
        changed = {**before, name: dataclasses.replace(record, overrides=kept)}
        monkeypatch.setattr(registry, "_by_folder", lambda: changed)

    return change


@pytest.mark.parametrize("name", marked(GENERIC))
def test_models_are_accepted_whose_pictures_come_out_as_in_their_class(
    name: str, tmp_path: Path, here: None
) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", name))
    compare(checkpoint, ModelBackend.AUTO, trust_remote_code=False)


@pytest.mark.parametrize("name", marked(RULES))
def test_own_prompt_rules_and_encoders_are_compared_beside_decoders_of_transformers(
    name: str, tmp_path: Path, here: None
) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", name))
    backend = ModelBackend.TRANSFORMERS
    assert compares_pictures(checkpoint, backend)
    compare(checkpoint, backend, trust_remote_code=False)


def test_whole_models_of_our_own_are_not_compared(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", "llava"))
    assert not compares_pictures(checkpoint, ModelBackend.AUTO)


def test_a_folder_that_names_no_class_is_not_compared(tmp_path: Path) -> None:
    """DeepSeek-VL2's released ones, whose decoder is the code of transformers."""
    folder = deepseek_vl2.write_checkpoint(tmp_path / "model")
    edited(folder / "config.json", without=("architectures",))
    assert not has_comparison(Checkpoint(folder), ModelBackend.AUTO)
    assert not compares_pictures(Checkpoint(folder), ModelBackend.AUTO)


class OtherRows(FuyuEncoder):
    """Rows that are too large."""

    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        return [2 * rows for rows in super().encode(items)]


class OtherTokens(Blip2Rule):
    """Ends every text with a token more."""

    def finish(self, ids: Ids) -> Ids:
        return np.append(ids, np.int32(5))


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("fuyu", {"encoder": f"{__name__}:OtherRows"}, "a prompt with a picture differs"),
        ("blip2", {"prompt": f"{__name__}:OtherTokens"}, "its processor writes other tokens"),
    ],
)
def test_a_family_is_refused_whose_own_part_is_wrong(
    name: str,
    changed: dict[str, Any],
    reason: str,
    tmp_path: Path,
    here: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", name))
    records = dict(registry._by_folder())
    records[name] = dataclasses.replace(records[name], **changed)
    monkeypatch.setattr(registry, "_by_folder", lambda: records)
    with pytest.raises(InvalidRequest, match=reason):
        compare(checkpoint, ModelBackend.AUTO, trust_remote_code=False)


def test_old_files_that_do_not_say_how_many_rows_a_picture_has(tmp_path: Path, here: None) -> None:
    """The class's processor writes none of them then, or fails: the rule's tokens are the class's too."""
    for name, key in (("blip2", "num_query_tokens"), ("llava", "patch_size")):
        folder = make_checkpoint(tmp_path / name, name)
        settings = folder / "processor_config.json"
        kept = json.loads(settings.read_text())
        del kept[key]
        settings.write_text(json.dumps(kept))
        compare(Checkpoint(folder), ModelBackend.TRANSFORMERS, trust_remote_code=False)


@pytest.mark.parametrize("name", marked(tuple(OWN)))
def test_a_model_is_refused_whose_pictures_come_out_otherwise(
    name: str, tmp_path: Path, here: None, without: Callable[[str, tuple[str, ...]], None]
) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", name))
    without(name, OWN[name])
    with pytest.raises(InvalidRequest, match="a prompt with a picture differs"):
        compare(checkpoint, ModelBackend.AUTO, trust_remote_code=False)


@pytest.mark.full
@pytest.mark.parametrize("backend", ModelBackend)
def test_the_decoder_that_is_compared_is_the_one_that_is_served(
    backend: ModelBackend, tmp_path: Path, here: None
) -> None:
    compare(Checkpoint(make_checkpoint(tmp_path / "model", "llava_onevision")), backend, False)


def test_the_process_says_why_a_model_is_refused_and_is_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idefics2's processor does not say what it writes for a picture: preprocess refuses it at its start. What
    libraries print is no part of what the process says."""
    make_loud(tmp_path / "loud", monkeypatch)
    folder = make_checkpoint(tmp_path / "model", "ovis2")
    settings = folder / "processor_config.json"
    settings.write_text(settings.read_text().replace("Ovis2Processor", "Idefics2Processor"))
    started: list[object] = []
    start = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)

    def refusal(folder: Path) -> str:
        with (
            Comparison(Checkpoint(folder), ModelBackend.AUTO, trust_remote_code=False) as running,
            pytest.raises(InvalidRequest, match="Idefics2Processor cannot be") as refused,
        ):
            running.require_equal()
        return refused.value.message

    first = refusal(folder)
    assert "--skip-model-check" not in first
    assert len(started) == 1
    assert refusal(folder) == first
    assert refusal(folder.rename(tmp_path / "elsewhere")) == first
    assert len(started) == 1
    changed = tmp_path / "elsewhere" / "tokenizer_config.json"
    changed.write_text(changed.read_text() + "\n")
    with Comparison(Checkpoint(changed.parent), ModelBackend.AUTO, trust_remote_code=False):
        assert len(started) == 2
