"""The Molmo reference: crops and their order, the tower, the language model, generation."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Qwen2Config, Qwen2ForCausalLM

from tests.reference_models.common import Draw, below, linear, noise
from tests.reference_models.image_processors import molmo_images
from tests.reference_models.molmo import Molmo, write_checkpoint

ASK = [("user", "<image>What?")]
ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Molmo:
    return Molmo(write_checkpoint(tmp_path_factory.mktemp("molmo")), vision_heads=4)


@pytest.mark.parametrize(
    ("size", "tiling"),
    [
        ((336, 336), (1, 1)),
        ((100, 80), (1, 1)),
        ((400, 300), (1, 2)),
        ((640, 480), (2, 3)),
        ((480, 640), (3, 2)),
        ((3000, 3000), (3, 3)),
        ((4000, 700), (1, 7)),
    ],
)
def test_tilings(size: tuple[int, int], tiling: tuple[int, int]) -> None:
    assert molmo_images.select_tiling(*size) == tiling


@pytest.mark.parametrize("size", [(336, 336), (640, 480), (200, 700)])
def test_each_patch_token_has_one_row_that_lies_where_it_stands(size: tuple[int, int]) -> None:
    cut = molmo_images.crops(noise(*size))
    rows, columns = molmo_images.token_grid(cut.tiling)
    order = cut.order[cut.order >= 0]
    assert sorted(order.tolist()) == list(range(144 + rows * columns))
    # The mean of each 2x2 cell is that of the padded image at the token's place.
    pixels, _ = molmo_images.resize_and_pad(noise(*size), *molmo_images.padded_size(cut.tiling))
    cells = pixels.unflatten(1, (rows, 28)).unflatten(3, (columns, 28)).mean((0, 2, 4)).flatten()
    found = cut.patches[1:].mean(-1).view(-1, 12, 2, 12, 2).mean((2, 4)).flatten()
    kept = cut.order[144:] >= 0
    torch.testing.assert_close(found[kept], cells[cut.order[144:][kept] - 144])


def test_the_tower_is_clip(model: Molmo) -> None:
    config = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=9,
        num_attention_heads=4,
        image_size=336,
        patch_size=14,
    )
    vit = below(model.vision, "image_vit.")
    patch = vit["patch_embedding.weight"].view(64, 14, 14, 3).permute(0, 3, 1, 2)
    weights = {
        "embeddings.class_embedding": vit["class_embedding"],
        "embeddings.position_embedding.weight": vit["positional_embedding"],
        "embeddings.patch_embedding.weight": patch,
    }
    weights |= {f"pre_layrnorm.{kind}": vit[f"pre_ln.{kind}"] for kind in ("weight", "bias")}
    for layer in range(9):
        part = below(vit, f"transformer.resblocks.{layer}.")
        pairs = {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()}
        pairs |= {"feed_forward.w1": "mlp.fc1", "feed_forward.w2": "mlp.fc2"}
        pairs |= {"attention_norm": "layer_norm1", "ffn_norm": "layer_norm2"}
        for ours, theirs in pairs.items():
            for kind in ("weight", "bias"):
                weights[f"encoder.layers.{layer}.{theirs}.{kind}"] = part[f"{ours}.{kind}"]
    theirs_model = CLIPVisionModel(config).eval()
    assert not theirs_model.load_state_dict(weights, strict=False).unexpected_keys
    pixels, _ = molmo_images.resize_and_pad(noise(40, 30), 336, 336)
    with torch.no_grad():
        states = theirs_model(pixels[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[-2][0, 1:], states[-9][0, 1:]], dim=-1)
    torch.testing.assert_close(
        model.tower(molmo_images.cut(pixels)), expected, atol=1e-3, rtol=1e-3
    )


def test_the_language_model_is_qwen2(model: Molmo) -> None:
    text = model.text
    weights = {
        "model.embed_tokens.weight": text["wte.embedding"],
        "model.norm.weight": text["ln_f.weight"],
        "lm_head.weight": text["ff_out.weight"],
    }
    for layer in range(2):
        part, name = below(text, f"blocks.{layer}."), f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            for letter, rows in zip(
                "qkv", part[f"att_proj.{kind}"].split([64, 32, 32]), strict=True
            ):
                weights[f"{name}self_attn.{letter}_proj.{kind}"] = rows
        up, gate = part["ff_proj.weight"].chunk(2)
        weights[f"{name}mlp.up_proj.weight"], weights[f"{name}mlp.gate_proj.weight"] = up, gate
        weights[f"{name}self_attn.o_proj.weight"] = part["attn_out.weight"]
        weights[f"{name}mlp.down_proj.weight"] = part["ff_out.weight"]
        weights[f"{name}input_layernorm.weight"] = part["attn_norm.weight"]
        weights[f"{name}post_attention_layernorm.weight"] = part["ff_norm.weight"]
    config = Qwen2Config(
        vocab_size=488,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    theirs = Qwen2ForCausalLM(config).eval()
    theirs.load_state_dict(weights)
    embeds = 5 * Draw(9).weight(9, 64)
    with torch.no_grad():
        expected = theirs(inputs_embeds=embeds[None]).logits[0]
    torch.testing.assert_close(model.decode(embeds), expected, atol=1e-3, rtol=1e-3)


def test_ids_count_rows_and_lines(model: Molmo) -> None:
    ids = model.prompt_ids(ASK, [(640, 480)])
    # 2 x 3 crops: 20 lines of 28 tokens.
    assert ids.count(model.patch) == 144 + 20 * 28
    assert ids.count(model.col) == 12 + 20
    assert [ids.count(model.start), ids.count(model.end)] == [2, 2]
    assert model.prompt(ASK) == " User: What? Assistant:"


def test_cells_are_pooled_by_their_mean(model: Molmo) -> None:
    part = below(model.vision, "image_pooling_2d.")
    theirs = nn.MultiheadAttention(64, 4, kdim=128, vdim=128, batch_first=True)
    features = 5 * Draw(9).weight(24, 24, 128)
    cell = features[4:6, 6:8].reshape(1, 4, 128)
    asked = linear(cell.mean(1, keepdim=True), part, "wq")
    weights = {
        "q_proj_weight": torch.eye(64),
        "k_proj_weight": part["wk.weight"],
        "v_proj_weight": part["wv.weight"],
        "in_proj_bias": torch.cat([torch.zeros(64), part["wk.bias"], part["wv.bias"]]),
        "out_proj.weight": part["wo.weight"],
        "out_proj.bias": part["wo.bias"],
    }
    theirs.load_state_dict(weights)
    with torch.no_grad():
        expected, _ = theirs(asked, cell, cell)
    pooled = model.pool(features.view(576, 128))
    torch.testing.assert_close(pooled[2 * 12 + 3], expected[0, 0], atol=1e-4, rtol=1e-4)


def test_images_matter_to_what_is_generated(model: Molmo) -> None:
    picture = noise(100, 80)
    ids = model.prompt_ids(ASK, [picture.size])
    result = model.generate(ids, [picture], 1)
    without = model.logits(ids, [torch.zeros(ids.count(model.patch), 64)])[-1]
    assert (result.logits[0] - without).abs().max() > 0.1


@pytest.mark.parametrize("changes", [{"norm_after": True}, {"attention_layer_norm": True}])
def test_variants_of_the_norms(tmp_path: Path, changes: dict[str, bool], model: Molmo) -> None:
    changed = Molmo(write_checkpoint(tmp_path, **changes))
    embeds = 5 * Draw(9).weight(5, 64)
    assert (changed.decode(embeds) - model.decode(embeds)).abs().max() > 0.1


def test_masks_are_those_of_the_crops_with_a_last_row_of_their_own() -> None:
    cut = molmo_images.crops(noise(224, 500))
    _, mask = molmo_images.resize_and_pad(noise(224, 500), *molmo_images.padded_size(cut.tiling))
    assert cut.masks.shape == (len(cut.patches), 576)
    torch.testing.assert_close(cut.masks[0], molmo_images.cut(mask[None, :336, :336]).mean(-1))
    assert (cut.masks[-1] == -1).all()
    assert (cut.masks == 0).any()
    assert ((cut.masks > 0) & (cut.masks < 1)).any()
