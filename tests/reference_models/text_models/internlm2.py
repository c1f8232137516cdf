"""InternLM2 with PLoRA: low-rank additions to the five linears on the rows of images.

Assumption: rope_scaling "dynamic" is not needed below max_position_embeddings, and is refused above.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference_models.common import Draw, Tensors, attention, causal, rms_norm, rotate_half

LINEARS = (
    "attention.wqkv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
Config = Mapping[str, Any]


def text_config(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """A tiny configuration with the keys of InternLM2."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "bias": False,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    } | changes


def draw(config: Config, random: Draw, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Tensors by their names in XComposer2; `ranks` of PLoRA for each of LINEARS, none where 0."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    sizes = {
        "attention.wqkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        "attention.wo": (heads * head_dim, hidden),
        "feed_forward.w1": (hidden, inner),
        "feed_forward.w2": (inner, hidden),
        "feed_forward.w3": (hidden, inner),
    }
    tensors = {"model.tok_embeddings.weight": random.weight(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (inputs, outputs) in sizes.items():
            biased = config["bias"] and name.startswith("attention")
            tensors |= random.linear(prefix + name, inputs, outputs, biased)
            if rank := ranks.get(name, 0):
                tensors |= random.linear(f"{prefix}{name}.Plora_A", inputs, rank, bias=False)
                tensors |= random.linear(f"{prefix}{name}.Plora_B", rank, outputs, bias=False)
        for norm in ("attention_norm", "ffn_norm"):
            tensors |= random.norm(prefix + norm, hidden, bias=False)
    tensors |= random.norm("model.norm", hidden, bias=False)
    return tensors | random.linear("output", hidden, config["vocab_size"], bias=False)


class InternLM2:
    """The language model; `scales` are alpha / r of each of LINEARS."""

    def __init__(self, config: Config, tensors: Tensors, scales: Mapping[str, float]) -> None:
        self._config, self._tensors, self._scales = config, tensors, scales
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config["num_key_value_heads"]

    @property
    def table(self) -> Tensor:
        """The embedding table [vocabulary, hidden]."""
        return self._tensors["model.tok_embeddings.weight"]

    def logits(self, embeds: Tensor, is_image: Tensor) -> Tensor:
        """[rows, vocabulary] for embeds [rows, hidden] and is_image [rows]."""
        eps = self._config["rms_norm_eps"]
        x, mask = embeds, is_image[:, None].float()
        for layer in range(self._config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            normed = rms_norm(x, self._tensors[prefix + "attention_norm.weight"], eps)
            x = x + self._attention(normed, mask, prefix)
            normed = rms_norm(x, self._tensors[prefix + "ffn_norm.weight"], eps)
            gate = functional.silu(self._linear(normed, mask, prefix, "feed_forward.w1"))
            up = self._linear(normed, mask, prefix, "feed_forward.w3")
            x = x + self._linear(gate * up, mask, prefix, "feed_forward.w2")
        x = rms_norm(x, self._tensors["model.norm.weight"], eps)
        return functional.linear(x, self._tensors["output.weight"])

    def _attention(self, x: Tensor, mask: Tensor, prefix: str) -> Tensor:
        # For each key head: its query heads, itself, its value head.
        packed = self._linear(x, mask, prefix, "attention.wqkv")
        group = self._heads // self._kv_heads
        packed = packed.view(len(x), self._kv_heads, group + 2, -1)
        query = packed[:, :, :group].flatten(1, 2)
        key, value = packed[:, :, group], packed[:, :, group + 1]
        positions = self._positions(len(x))
        base = float(self._config["rope_theta"])
        query, key = rotate_half(query, positions, base), rotate_half(key, positions, base)
        return self._linear(
            attention(query, key, value, causal(len(x))), mask, prefix, "attention.wo"
        )

    def _positions(self, length: int) -> Tensor:
        positions = torch.arange(length).float()
        scaling = self._config.get("rope_scaling")
        if scaling and scaling["type"] == "linear":
            return positions / float(scaling["factor"])
        if scaling and length > self._config["max_position_embeddings"]:
            raise ValueError("dynamic rope scaling is not implemented")
        return positions

    def _linear(self, x: Tensor, mask: Tensor, prefix: str, name: str) -> Tensor:
        full = prefix + name
        y = functional.linear(x, self._tensors[full + ".weight"], self._tensors.get(full + ".bias"))
        if f"{full}.Plora_A.weight" not in self._tensors:
            return y
        low = functional.linear(x, self._tensors[f"{full}.Plora_A.weight"])
        added = functional.linear(low, self._tensors[f"{full}.Plora_B.weight"])
        return y + added * self._scales[name] * mask
