"""The InternLM2 reference against transformers' Llama with renamed weights and hooks."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.reference_models.common import Draw
from tests.reference_models.text_models.internlm2 import LINEARS, InternLM2, draw, text_config

CONFIG = text_config(96)
RANKS = dict.fromkeys(LINEARS, 4)
SCALES = {name: 0.5 + place for place, name in enumerate(LINEARS)}
NAMES = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def split(packed: Tensor) -> dict[str, Tensor]:
    """The packed rows of wqkv as those of q_proj, k_proj and v_proj, for 2 groups of 2 heads."""
    parts = packed.view(2, 4, 16, -1)
    rows = {"q_proj": parts[:, :2], "k_proj": parts[:, 2], "v_proj": parts[:, 3]}
    return {name: part.reshape(-1, packed.shape[1]) for name, part in rows.items()}


def llama(tensors: dict[str, Tensor]) -> LlamaForCausalLM:
    """LlamaForCausalLM with the same weights, PLoRA left out."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    weights = {
        "model.embed_tokens.weight": tensors["model.tok_embeddings.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for ours, theirs in NAMES.items():
            weights[f"{prefix}{theirs}.weight"] = tensors[f"{prefix}{ours}.weight"]
        for name, rows in split(tensors[prefix + "attention.wqkv.weight"]).items():
            weights[f"{prefix}self_attn.{name}.weight"] = rows
    model.load_state_dict(weights)
    return model


def add_plora(model: LlamaForCausalLM, tensors: dict[str, Tensor], mask: Tensor) -> None:
    """Hooks that add the low-rank part to all seven linears."""

    def hook(linear: nn.Module, low: Tensor, high: Tensor, scale: float) -> None:
        linear.register_forward_hook(
            lambda _, inputs, output: output + inputs[0] @ low.T @ high.T * scale * mask
        )

    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in LINEARS:
            low = tensors[f"{prefix}{name}.Plora_A.weight"]
            high = tensors[f"{prefix}{name}.Plora_B.weight"]
            parts = split(high) if name.endswith("wqkv") else {NAMES.get(name, ""): high}
            for part, rows in parts.items():
                path = part if "." in part else f"self_attn.{part}"
                hook(model.get_submodule(prefix + path), low, rows, SCALES[name])


def test_without_images_it_is_llama() -> None:
    tensors = draw(CONFIG, Draw(0), RANKS)
    embeds = 5 * Draw(9).weight(9, 64)
    ours = InternLM2(CONFIG, tensors, SCALES).logits(embeds, torch.zeros(9, dtype=torch.bool))
    with torch.no_grad():
        theirs = llama(tensors)(inputs_embeds=embeds[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_on_rows_of_images_it_is_llama_with_hooks() -> None:
    tensors = draw(CONFIG, Draw(1), RANKS)
    embeds, is_image = 5 * Draw(9).weight(9, 64), torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 0]) > 0
    ours = InternLM2(CONFIG, tensors, SCALES).logits(embeds, is_image)
    model = llama(tensors)
    add_plora(model, tensors, is_image[:, None].float())
    with torch.no_grad():
        theirs = model(inputs_embeds=embeds[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    plain = InternLM2(CONFIG, tensors, dict.fromkeys(LINEARS, 0.0)).logits(embeds, is_image)
    assert (ours - plain).abs().max() > 1
