"""What is loaded, and what a tower promises about batches."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.vision_checkpoints import llava_checkpoint

from services.vision_encoder import models
from services.vision_encoder.models import load_vision_model
from services.vision_encoder.models.vision_model import VisionItem
from shared.checkpoint import Checkpoint
from shared.errors import Unavailable

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> None:
    load_vision_model(Checkpoint(folder), torch.device("cpu"), torch.float32)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("multi_modal_projector.linear_2.bias"), "projector.linear_2.bias"),
        (without("vision_tower.encoder.layers.0.mlp.fc1.weight"), "layers.0.mlp.fc1.weight"),
        (lambda t: {**t, "vision_tower.gate": torch.zeros(1)}, "vision_tower.gate"),
        (
            lambda t: {**t, "multi_modal_projector.linear_1.weight": torch.zeros(3, 3)},
            "multi_modal_projector.linear_1.weight",
        ),
    ],
)
def test_wrong_tensors_are_named(
    change: Callable[[Tensors], Tensors], named: str, tmp_path: Path
) -> None:
    folder = llava_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(Unavailable, match=named.replace(".", r"\.")):
        load(folder)


def test_layers_that_are_not_used_may_be_missing(tmp_path: Path) -> None:
    folder = llava_checkpoint(tmp_path)  # the layer before the last
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = [name for name in tensors if name.startswith("vision_tower.encoder.layers.3.")]
    assert last
    save_file({k: v for k, v in tensors.items() if k not in last}, file, {"format": "pt"})
    load(folder)


def test_the_default_element_type(tmp_path: Path) -> None:
    checkpoint = Checkpoint(llava_checkpoint(tmp_path))
    assert checkpoint.default_dtype("cpu") == "float32"
    assert checkpoint.default_dtype("cuda") == "bfloat16"


@pytest.mark.parametrize(("engine", "threads"), [("kernels", 1), ("kernels", 2), ("torch", 2)])
@pytest.mark.parametrize(("tower", "side", "patch"), [("siglip", 144, 16), ("clip", 196, 14)])
def test_a_tower_of_usual_size_is_row_invariant(
    tower: str,
    side: int,
    patch: int,
    engine: str,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if engine == "torch":
        monkeypatch.setattr(models, "load_kernels", lambda threads: None)
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 6}
    changes = {**sizes, "num_hidden_layers": 4, "image_size": side, "patch_size": patch}
    folder = llava_checkpoint(tmp_path, tower, vision_changes=changes)
    model = load_vision_model(Checkpoint(folder), torch.device("cpu"), torch.float32, threads)
    assert model is not None
    generator = np.random.default_rng(0)
    shape = (3, side, side)
    items = [VisionItem(generator.normal(size=shape).astype(np.float32)) for _ in range(12)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [model.encode([item])[0] for item in items]
        for count in (2, 3, 5, 12):
            for one, other in zip(alone, model.encode(items[:count]), strict=False):
                assert torch.equal(one, other), count
    finally:
        torch.set_num_threads(before)
