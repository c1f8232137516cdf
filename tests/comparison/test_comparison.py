"""Prompts with pictures against the class's own forward, before a model is served."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from services.comparison import compare as comparing
from services.comparison import prompts
from services.comparison.compare import compare
from services.families import registry
from services.families.comparison import Comparison
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tests.support.checkpoints import GENERIC, make_checkpoint

BY_DEFAULT = ("ovis2", "ernie4_5_vl_moe")
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


def test_the_process_says_why_a_model_is_refused(tmp_path: Path) -> None:
    """Idefics2's processor does not say what it writes for a picture: preprocess refuses it at its start."""
    folder = make_checkpoint(tmp_path / "model", "ovis2")
    settings = folder / "processor_config.json"
    settings.write_text(settings.read_text().replace("Ovis2Processor", "Idefics2Processor"))
    with (
        Comparison(Checkpoint(folder), ModelBackend.AUTO, trust_remote_code=False) as comparison,
        pytest.raises(InvalidRequest, match="Idefics2Processor cannot be") as refused,
    ):
        comparison.require_equal()
    assert "--skip-model-check" not in refused.value.message
