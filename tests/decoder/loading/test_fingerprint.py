"""Which decoders may serve one model together."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.decoder.loading.load import fingerprint
from shared.block_hash import root_name
from shared.checkpoint.folder import Checkpoint
from shared.weights.scheme import NONE, SCHEMES


def fingerprint_of(folder: Path, **config: object) -> bytes:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    return fingerprint(Checkpoint(folder), torch.float32, "native")


def test_where_a_checkpoint_comes_from_does_not_tell_a_fine_tune_from_its_model(
    tmp_path: Path,
) -> None:
    text = {"hidden_size": 8, "_name_or_path": "base", "transformers_version": "4.50.0"}
    first = fingerprint_of(tmp_path / "first", text_config=text, _name_or_path="base")
    tuned = {**text, "_name_or_path": "out/step-900", "transformers_version": "5.0.0"}
    assert fingerprint_of(tmp_path / "tuned", text_config=tuned) == first
    other = {**text, "hidden_size": 16}
    assert fingerprint_of(tmp_path / "other", text_config=other) != first


def test_decoders_of_different_caches_do_not_go_on_with_each_others_answers(tmp_path: Path) -> None:
    fingerprint_of(tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    codes, numbers = (
        fingerprint(checkpoint, torch.float32, "native", kv_cache=kind) for kind in ("int8", "auto")
    )
    assert codes != numbers == fingerprint(checkpoint, torch.float32, "native")
    assert root_name(16, "", b"", kv_cache_dtype="int8") != root_name(16, "", b"")


def test_decoders_that_quantize_in_different_ways_do_not_go_on_with_each_others_answers(
    tmp_path: Path,
) -> None:
    fingerprint_of(tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    names = [NONE, *SCHEMES]
    found = {
        name: fingerprint(checkpoint, torch.float32, "native", quantization=name) for name in names
    }
    assert found[NONE] == fingerprint(checkpoint, torch.float32, "native")
    assert found["int4"] == found["int4g32"]  # two names of one scheme, for so small a model
    assert len(set(found.values())) == len(names) - 1
