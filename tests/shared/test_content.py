"""The digest of a checkpoint's weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    made = torch.Generator().manual_seed(3)
    layers = {
        f"layers.{i}.{name}.weight": torch.randn(96, 64, generator=made, dtype=torch.bfloat16)
        for i in range(3)
        for name in ("up_proj", "down_proj")
    }
    return {**layers, "norm.weight": torch.ones(64), "scale": torch.tensor(2.0)}


def digest_of(folder: Path, content: Tensors, file: str = "model.safetensors") -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if file.endswith(".safetensors"):
        save_file(content, folder / file)
    else:
        torch.save(content, folder / file)
    return content_digest(Checkpoint(folder))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_equal_weights_have_equal_digests_and_a_fine_tune_has_another(
    tmp_path: Path, file: str
) -> None:
    before = digest_of(tmp_path / "a", tensors(), file)
    assert len(before) == 16
    assert digest_of(tmp_path / "a copy", tensors(), file) == before
    for name in tensors():
        tuned = tensors()
        tuned[name] = tuned[name] * 1.5
        assert digest_of(tmp_path / "tuned", tuned, file) != before, name
    renamed = {f"model.{name}": tensor for name, tensor in tensors().items()}
    assert digest_of(tmp_path / "renamed", renamed, file) != before


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_the_first_and_the_last_numbers_of_a_large_tensor_count(tmp_path: Path, file: str) -> None:
    large = torch.arange(200_000, dtype=torch.float32)
    before = digest_of(tmp_path / "a", {"w": large}, file)
    for place in (0, 15, -16, -1):
        changed = large.clone()
        changed[place] += 0.5
        assert digest_of(tmp_path / "b", {"w": changed}, file) != before, place


def test_each_shard_counts(tmp_path: Path) -> None:
    folders = []
    for number, factor in enumerate((1.0, 1.5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        save_file({"a": torch.ones(5_000)}, folder / "model-00001-of-00002.safetensors")
        save_file({"b": torch.ones(5_000) * factor}, folder / "model-00002-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-00001-of-00002.safetensors",'
            ' "b": "model-00002-of-00002.safetensors"}}'
        )
        folders.append(content_digest(Checkpoint(folder)))
    assert folders[0] != folders[1]


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    digest_of(tmp_path / "a", tensors())
    checkpoint = Checkpoint(tmp_path / "a")
    checkpoint.names()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(InvalidRequest, match=r"model\.safetensors cannot be read"):
        content_digest(checkpoint)
