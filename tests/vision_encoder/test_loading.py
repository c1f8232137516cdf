"""What is loaded, and what a tower promises about batches."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig as TransformersConfig

from services.families.family import ItemSize
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import pixel_item
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.llava import LlavaConfig, TowerConfig
from shared.settings import child_environment
from tests.support.checkpoints import as_torch_files
from tests.support.vision_checkpoints import llava_checkpoint
from tests.support.vision_encoder import tower_engine

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> None:
    load_encoder(Checkpoint(folder), CpuDevice(torch.float32))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def coded(name: str) -> Callable[[Tensors], Tensors]:
    """A layer as codes and scales."""

    def change(tensors: Tensors) -> Tensors:
        codes = {f"{name}.qweight": torch.zeros(4, 4, dtype=torch.int32)}
        return {**without(f"{name}.weight")(tensors), **codes, f"{name}.scales": torch.ones(1, 4)}

    return change


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
        (
            coded("vision_tower.encoder.layers.1.self_attn.v_proj"),
            "layers.1.self_attn.v_proj.qweight, vision_tower.encoder.layers.1.self_attn.v_proj.scales"
            " in the place of a weight: codes",
        ),
        (
            lambda t: {**t, "multi_modal_projector.linear_2.weight": torch.ones(64, 64).char()},
            "multi_modal_projector.linear_2.weight in I8: codes",
        ),
    ],
)
def test_wrong_tensors_are_named(
    change: Callable[[Tensors], Tensors], named: str, tmp_path: Path
) -> None:
    folder = llava_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(InvalidRequest, match=named.replace(".", r"\.")):
        load(folder)


def test_layers_that_are_not_used_may_be_missing(tmp_path: Path) -> None:
    folder = llava_checkpoint(tmp_path)  # the layer before the last
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = [name for name in tensors if name.startswith("vision_tower.encoder.layers.3.")]
    assert last
    save_file({k: v for k, v in tensors.items() if k not in last}, file, {"format": "pt"})
    load(folder)


def test_a_tower_of_pickled_weights_is_the_same(tmp_path: Path) -> None:
    folder = llava_checkpoint(tmp_path)
    encoder = load_encoder(Checkpoint(folder), CpuDevice(torch.float32))
    pickled = load_encoder(Checkpoint(as_torch_files(folder)), CpuDevice(torch.float32))
    assert encoder and pickled
    expected = encoder.encode([encoder.sample(ItemSize(48, 48))])
    found = pickled.encode([pickled.sample(ItemSize(48, 48))])
    assert torch.equal(found[0], expected[0])


def test_the_default_element_type(tmp_path: Path) -> None:
    checkpoint = Checkpoint(llava_checkpoint(tmp_path))
    assert checkpoint.default_dtype("cpu") == "float32"
    assert checkpoint.default_dtype("cuda") == "bfloat16"


@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model", "other", None])
def test_what_config_leaves_out_is_what_transformers_takes(
    tmp_path: Path, tower: str | None
) -> None:
    written = {} if tower is None else {"vision_config": {"model_type": tower}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    if tower == "other":
        with pytest.raises(InvalidRequest, match="other tower"):
            LlavaConfig.read(Checkpoint(tmp_path))
        return
    ours, theirs = LlavaConfig.read(Checkpoint(tmp_path)), TransformersConfig.from_dict(written)
    vision: Any = theirs.vision_config
    assert ours.tower == TowerConfig(
        is_clip=vision.model_type == "clip_vision_model",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        num_channels=vision.num_channels,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        activation=vision.hidden_act,
        eps=vision.layer_norm_eps,
    )
    assert ours.layers == (vision.num_hidden_layers + 1 + theirs.vision_feature_layer,)
    assert ours.drops_first == (theirs.vision_feature_select_strategy == "default")
    assert ours.text_size == theirs.text_config.hidden_size
    assert ours.projector_activation == theirs.projector_hidden_act
    assert ours.projector_bias == theirs.multimodal_projector_bias


def test_llava_is_loaded_without_transformers_and_compilers(tmp_path: Path) -> None:
    # Their modules are more than half of what this service would import.
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from services.vision_encoder.devices.cpu.device import CpuDevice\n"
        "from services.vision_encoder.loading import load_encoder\n"
        "from shared.checkpoint.folder import Checkpoint\n"
        "model = load_encoder(Checkpoint(Path(sys.argv[1])), CpuDevice(torch.float32))\n"
        "from services.families.family import ItemSize\n"
        "rows = model.encode([model.sample(ItemSize(224, 224))])\n"
        "print(len(rows), {'transformers', 'torch._dynamo', 'sympy'} & set(sys.modules))"
    )
    folder = llava_checkpoint(tmp_path)
    told = subprocess.check_output(
        [sys.executable, "-c", script, str(folder)],
        text=True,
        env=child_environment(PYTHONPATH=os.pathsep.join(sys.path)),
    )
    assert told.splitlines()[-1] == "1 set()"


@pytest.mark.parametrize(
    ("tower", "side", "patch", "engine", "threads"),
    [
        ("siglip", 144, 16, "kernels", 1),
        ("siglip", 144, 16, "kernels", 2),
        ("clip", 196, 14, "kernels", 1),
        ("clip", 196, 14, "kernels", 2),
        ("clip", 196, 14, "torch", 2),
        pytest.param("siglip", 144, 16, "torch", 2, marks=pytest.mark.full),
    ],
)
def test_a_tower_of_usual_size_is_row_invariant(
    tower: str,
    side: int,
    patch: int,
    engine: str,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tower_engine.choose(engine, monkeypatch)
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 6}
    changes = {**sizes, "num_hidden_layers": 4, "image_size": side, "patch_size": patch}
    folder = llava_checkpoint(tmp_path, tower, vision_changes=changes)
    model = load_encoder(Checkpoint(folder), CpuDevice(torch.float32, threads))
    assert model is not None
    generator = np.random.default_rng(0)
    shape = (3, side, side)
    items = [pixel_item(generator.normal(size=shape).astype(np.float32)) for _ in range(12)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [model.encode([item])[0] for item in items]
        for count in (2, 3, 5, 12):
            for one, other in zip(alone, model.encode(items[:count]), strict=False):
                assert torch.equal(one, other), count
    finally:
        torch.set_num_threads(before)
