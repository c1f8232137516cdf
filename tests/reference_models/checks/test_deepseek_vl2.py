"""The DeepSeek-VL2 reference: tiles, counts, SigLIP's tower, the projector, generation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import SiglipVisionConfig, SiglipVisionModel

from tests.reference_models.common import Draw, below, linear, noise
from tests.reference_models.deepseek_vl2 import DeepSeekVL2, write_checkpoint
from tests.reference_models.image_processors import deepseek_vl2_images

RELEASED = [[384 * a, 384 * b] for a, b in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (3, 3))]
ASK = [("user", "<image>What?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepSeekVL2:
    return DeepSeekVL2(write_checkpoint(tmp_path_factory.mktemp("vl2"), side=42))


@pytest.mark.parametrize(
    ("size", "images", "tiles"),
    [
        ((200, 200), 1, (1, 1)),
        ((760, 380), 1, (2, 1)),
        ((300, 900), 1, (1, 3)),
        ((2000, 2000), 2, (3, 3)),
        ((2000, 2000), 3, (1, 1)),
    ],
)
def test_the_best_resolution(size: tuple[int, int], images: int, tiles: tuple[int, int]) -> None:
    assert deepseek_vl2_images.tile_counts(*size, RELEASED, images) == tiles


@pytest.mark.parametrize("size", [(40, 40), (90, 40), (40, 200), (500, 500)])
def test_rows_are_as_many_as_placeholders(model: DeepSeekVL2, size: tuple[int, int]) -> None:
    # 3 patches a side become 2 cells.
    ids = model.prompt_ids(ASK, [size])
    columns, rows = deepseek_vl2_images.tile_counts(*size, model.candidates, 1)
    assert ids.count(model.image_id) == 2 * 3 + 1 + 2 * rows * (2 * columns + 1)
    assert len(model.embed_image(noise(*size))) == ids.count(model.image_id)


def test_the_tower_is_siglip(model: DeepSeekVL2) -> None:
    config = SiglipVisionConfig(
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=42,
        patch_size=14,
        vision_use_head=False,
    )
    vision = below(model.tensors, "vision.")
    weights = {"embeddings.position_embedding.weight": vision["pos_embed"][0]}
    for kind in ("weight", "bias"):
        weights[f"embeddings.patch_embedding.{kind}"] = vision[f"patch_embed.proj.{kind}"]
        weights[f"post_layernorm.{kind}"] = vision[f"norm.{kind}"]
        for layer in range(2):
            part, name = below(vision, f"blocks.{layer}."), f"encoder.layers.{layer}."
            for letter, matrix in zip("qkv", part[f"attn.qkv.{kind}"].chunk(3), strict=True):
                weights[f"{name}self_attn.{letter}_proj.{kind}"] = matrix
            weights[f"{name}self_attn.out_proj.{kind}"] = part[f"attn.proj.{kind}"]
            for number in (1, 2):
                weights[f"{name}mlp.fc{number}.{kind}"] = part[f"mlp.fc{number}.{kind}"]
                weights[f"{name}layer_norm{number}.{kind}"] = part[f"norm{number}.{kind}"]
    theirs_model = SiglipVisionModel(config).eval()
    assert not theirs_model.load_state_dict(weights, strict=False).unexpected_keys
    pixels = model.pixel_values(noise(30, 50))
    with torch.no_grad():
        expected = theirs_model(pixels).last_hidden_state
    ours = torch.stack([model.tower(view) for view in pixels])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_the_projector_takes_torchs_unfolding(model: DeepSeekVL2) -> None:
    x = 5 * Draw(9).weight(9, 48)
    grid = functional.pad(x.view(3, 3, 48), (0, 0, 0, 1, 0, 1)).permute(2, 0, 1)[None]
    packed = functional.unfold(grid, 2, stride=2)[0].T
    y = functional.gelu(linear(packed, model.tensors, "projector.layers.0"))
    expected = linear(y, model.tensors, "projector.layers.2").view(2, 2, -1)
    torch.testing.assert_close(model.project(x), expected)


def test_tiles_lie_as_in_the_image(model: DeepSeekVL2) -> None:
    picture = noise(84, 42)
    pixels = model.pixel_values(picture)
    assert pixels.shape == (3, 3, 42, 42)
    rows = model.embed_image(picture)
    newline, separator = model.tensors["image_newline"], model.tensors["view_seperator"]
    assert [i for i, row in enumerate(rows) if torch.equal(row, newline)] == [2, 5, 11, 16]
    assert torch.equal(rows[6], separator)
    right = model.project(model.tower(pixels[2]))
    torch.testing.assert_close(rows[14:16], right[1])


def test_the_prompt(model: DeepSeekVL2) -> None:
    turns = [("system", "S "), *ASK, ("assistant", " Dogs."), ("user", "And?")]
    ids = model.prompt_ids(turns, [(40, 40)])
    shown = [token for token in ids if token != model.image_id]
    assert model.tokenizer.decode(shown, skip_special_tokens=False) == (
        "<｜begin▁of▁sentence｜>S<|User|>: What?\n\n<|Assistant|>:Dogs.<｜end▁of▁sentence｜>"
        "<|User|>: And?\n\n<|Assistant|>:"
    )


@pytest.mark.parametrize("changes", [{}, {"third": True}, {"text": {"use_mla": False}}])
def test_images_matter_to_what_is_generated(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = DeepSeekVL2(write_checkpoint(tmp_path, side=42, **changes))
    picture = noise(30, 20)
    ids = model.prompt_ids(ASK, [picture.size])
    result = model.generate(ids, [picture], 2)
    without = model.logits(ids, [torch.zeros(ids.count(model.image_id), 64)])[-1]
    assert (result.logits[0] - without).abs().max() > 0.1
