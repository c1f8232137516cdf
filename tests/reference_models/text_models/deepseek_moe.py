"""DeepSeek-VL2's smallest text model (`use_mla` false): Llama's attention, DeepSeek's experts.

Assumption: routing is V2's greedy one: softmax over all experts, the largest, times
routed_scaling_factor; they are divided by their sum before that where norm_topk_prob is true.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference_models.common import (
    Draw,
    Tensors,
    attention,
    below,
    causal,
    linear,
    rms_norm,
    rotate_half,
)

Config = Mapping[str, Any]


def draw(config: Config, random: Draw) -> dict[str, Tensor]:
    """Tensors by their released names, without the prefix `language.`."""
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    tensors = random.linear("model.embed_tokens", hidden, config["vocab_size"], bias=False)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= random.linear(f"{name}self_attn.{part}", hidden, hidden, bias=False)
        tensors |= random.norm(f"{name}input_layernorm", hidden, bias=False)
        tensors |= random.norm(f"{name}post_attention_layernorm", hidden, bias=False)
        if layer < config["first_k_dense_replace"]:
            tensors |= _draw_mlp(f"{name}mlp", hidden, config["intermediate_size"], random)
            continue
        tensors |= random.linear(f"{name}mlp.gate", hidden, experts, bias=False)
        inner = config["moe_intermediate_size"]
        shared = inner * config["n_shared_experts"]
        tensors |= _draw_mlp(f"{name}mlp.shared_experts", hidden, shared, random)
        for expert in range(experts):
            tensors |= _draw_mlp(f"{name}mlp.experts.{expert}", hidden, inner, random)
    tensors |= random.norm("model.norm", hidden, bias=False)
    return tensors | random.linear("lm_head", hidden, config["vocab_size"], bias=False)


def _draw_mlp(name: str, hidden: int, inner: int, random: Draw) -> dict[str, Tensor]:
    tensors = random.linear(f"{name}.gate_proj", hidden, inner, bias=False)
    tensors |= random.linear(f"{name}.up_proj", hidden, inner, bias=False)
    return tensors | random.linear(f"{name}.down_proj", inner, hidden, bias=False)


class DeepSeekMoe:
    """The text model with these tensors."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        self._config, self._tensors = config, tensors

    @property
    def table(self) -> Tensor:
        """The embedding table [vocabulary, hidden]."""
        return self._tensors["model.embed_tokens.weight"]

    def logits(self, x: Tensor) -> Tensor:
        """[rows, vocabulary] for embeddings [rows, hidden]."""
        eps = self._config["rms_norm_eps"]
        for layer in range(self._config["num_hidden_layers"]):
            part = below(self._tensors, f"model.layers.{layer}.")
            x = x + self._attention(rms_norm(x, part["input_layernorm.weight"], eps), part)
            y = rms_norm(x, part["post_attention_layernorm.weight"], eps)
            dense = layer < self._config["first_k_dense_replace"]
            x = x + (mlp(y, part, "mlp") if dense else self.experts(y, below(part, "mlp.")))
        x = rms_norm(x, self._tensors["model.norm.weight"], eps)
        return linear(x, self._tensors, "lm_head")

    def _attention(self, x: Tensor, part: Tensors) -> Tensor:
        heads, positions = self._config["num_attention_heads"], torch.arange(len(x))
        query, key, value = (
            linear(x, part, f"self_attn.{name}_proj").unflatten(-1, (heads, -1)) for name in "qkv"
        )
        base = float(self._config["rope_theta"])
        query, key = rotate_half(query, positions, base), rotate_half(key, positions, base)
        return linear(attention(query, key, value, causal(len(x))), part, "self_attn.o_proj")

    def experts(self, x: Tensor, part: Tensors) -> Tensor:
        """The shared experts and, weighted, those chosen for each row."""
        scores = linear(x, part, "gate").softmax(-1)
        weights, chosen = scores.topk(self._config["num_experts_per_tok"])
        if self._config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        rows = []
        for row, row_weights, row_chosen in zip(x, weights, chosen, strict=True):
            parts = [mlp(row, part, f"experts.{int(expert)}") for expert in row_chosen]
            rows.append(row_weights @ torch.stack(parts))
        routed = torch.stack(rows) * float(self._config["routed_scaling_factor"])
        return routed + mlp(x, part, "shared_experts")


def mlp(x: Tensor, part: Tensors, name: str) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate, up = linear(x, part, f"{name}.gate_proj"), linear(x, part, f"{name}.up_proj")
    return linear(functional.silu(gate) * up, part, f"{name}.down_proj")
