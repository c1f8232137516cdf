"""The Qwen-VL reference against transformers' Qwen2 and torch's attention; prompt, generation."""

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.reference_models.common import Draw, below, noise
from tests.reference_models.qwen_vl import QwenVL, to_grid, write_checkpoint

ASK = [("user", "<image>and <image>What?"), ("assistant", "Dogs."), ("user", "<image>And this?")]
RENAMED = {
    "attn.c_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.up_proj",
    "mlp.w2": "mlp.gate_proj",
    "mlp.c_proj": "mlp.down_proj",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> QwenVL:
    return QwenVL(write_checkpoint(tmp_path_factory.mktemp("qwen")))


def renamed(model: QwenVL) -> dict[str, torch.Tensor]:
    """The language model's tensors by Qwen2's names."""
    weights = {
        "model.embed_tokens.weight": model.tensors["transformer.wte.weight"],
        "model.norm.weight": model.tensors["transformer.ln_f.weight"],
        "lm_head.weight": model.tensors["lm_head.weight"],
    }
    for layer in range(2):
        part, prefix = below(model.tensors, f"transformer.h.{layer}."), f"model.layers.{layer}."
        for ours, theirs in RENAMED.items():
            weights[f"{prefix}{theirs}.weight"] = part[f"{ours}.weight"]
        for kind in ("weight", "bias"):
            rows = part[f"attn.c_attn.{kind}"].chunk(3)
            for name, rows_of_one in zip("qkv", rows, strict=True):
                weights[f"{prefix}self_attn.{name}_proj.{kind}"] = rows_of_one
    return weights


def test_the_language_model_is_qwen2(model: QwenVL) -> None:
    config = Qwen2Config(
        vocab_size=model.config["vocab_size"],
        hidden_size=256,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    theirs = Qwen2ForCausalLM(config).eval()
    theirs.load_state_dict(renamed(model))
    embeds = 5 * Draw(9).weight(9, 256)
    with torch.no_grad():
        expected = theirs(inputs_embeds=embeds[None]).logits[0]
    torch.testing.assert_close(model.text(embeds), expected, atol=1e-3, rtol=1e-3)


def test_the_resampler_is_torchs_attention_with_positions_on_queries_and_keys(
    model: QwenVL,
) -> None:
    part = below(model.visual, "attn_pool.")
    theirs = nn.MultiheadAttention(256, 2)
    theirs.load_state_dict(below(part, "attn."))
    norm = {name: nn.LayerNorm(256, eps=1e-6) for name in ("ln_q", "ln_kv")}
    for name, module in norm.items():
        module.load_state_dict(below(part, f"{name}."))
    x = 5 * Draw(9).weight(16, 64)
    with torch.no_grad():
        value = norm["ln_kv"](x @ part["kv_proj.weight"].T)
        key = value + to_grid(part["pos_embed"], 16)
        expected, _ = theirs(norm["ln_q"](part["query"]) + part["pos_embed"], key, value)
    torch.testing.assert_close(model.resample(x), expected, atol=1e-3, rtol=1e-3)


def test_the_tower_attends_by_heads_of_query_key_and_value(model: QwenVL) -> None:
    theirs = nn.MultiheadAttention(64, 4)
    part = below(model.visual, "transformer.resblocks.0.attn.")
    order = torch.arange(192).view(4, 3, 16).transpose(0, 1).flatten()
    weights = {
        "in_proj_weight": part["in_proj.weight"][order],
        "in_proj_bias": part["in_proj.bias"][order],
        **{f"out_proj.{kind}": part[f"out_proj.{kind}"] for kind in ("weight", "bias")},
    }
    theirs.load_state_dict(weights)
    block = below(model.visual, "transformer.resblocks.0.")
    pixels = model.pixel_values(noise(20, 20))
    one = QwenVL.__new__(QwenVL)
    one.config, one.visual = {"visual": {"heads": 4, "layers": 1}}, model.visual
    zero = QwenVL.__new__(QwenVL)
    zero.config, zero.visual = {"visual": {"heads": 4, "layers": 0}}, model.visual
    x = zero.tower(pixels)
    functional = nn.functional
    with torch.no_grad():
        y = functional.layer_norm(x, (64,), block["ln_1.weight"], block["ln_1.bias"], 1e-6)
        x = x + theirs(y, y, y)[0]
        y = functional.layer_norm(x, (64,), block["ln_2.weight"], block["ln_2.bias"], 1e-6)
        y = functional.gelu(y @ block["mlp.c_fc.weight"].T + block["mlp.c_fc.bias"])
        x = x + y @ block["mlp.c_proj.weight"].T + block["mlp.c_proj.bias"]
    torch.testing.assert_close(one.tower(pixels), x, atol=1e-4, rtol=1e-4)


def test_pictures_are_numbered_anew_in_each_message(model: QwenVL) -> None:
    ids = model.prompt_ids(ASK, [(5, 5)] * 3)
    pieces = {rank: piece for piece, rank in model.words.ranks.items()}
    start = model.image_ids[0]
    special = {len(pieces) + 1: "[S]", len(pieces) + 2: "[E]", start: "[", start + 1: "]"}
    spelt = [special.get(i, "") if i >= len(pieces) else pieces[i].decode() for i in ids]
    assert "".join(spelt) == (
        "[S]system\nYou are a helpful assistant.[E]"
        "\n[S]user\nPicture 1: []\nand Picture 2: []\nWhat?[E]"
        "\n[S]assistant\nDogs.[E]"
        "\n[S]user\nPicture 1: []\nAnd this?[E]"
        "\n[S]assistant\n"
    )
    assert ids.count(start + 2) == 3 * 256


def test_released_ids_follow_from_the_number_of_ranks(model: QwenVL) -> None:
    offset = 151643 - len(model.words.ranks)
    assert [token + offset for token in model.image_ids[::257]] == [151857, 151858]
    assert model.image_ids[1] + offset == 151859
    assert model.words.special(1) + offset == 151644


def test_images_matter_to_what_is_generated(model: QwenVL) -> None:
    picture = noise(30, 20)
    ids = model.prompt_ids([("user", "<image>What?")], [picture.size])
    result = model.generate(ids, [picture], 1)
    without = model.logits(ids, [torch.zeros(256, 256)])[-1]
    assert (result.logits[0] - without).abs().max() > 0.1
