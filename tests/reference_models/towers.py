"""Vision towers with the tensor names that transformers gives CLIP, SigLIP and Idefics2."""

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
    count_layers,
    layer_norm,
    linear,
)

Config = Mapping[str, Any]


def draw_layers(random: Draw, prefix: str, config: Config) -> dict[str, Tensor]:
    """The encoder's layers, for `hidden_size`, `intermediate_size` and `num_hidden_layers`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tensors: dict[str, Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}encoder.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= random.linear(f"{name}self_attn.{part}", hidden, hidden)
        tensors |= random.linear(f"{name}mlp.fc1", hidden, inner)
        tensors |= random.linear(f"{name}mlp.fc2", inner, hidden)
        for norm in ("layer_norm1", "layer_norm2"):
            tensors |= random.norm(name + norm, hidden)
    return tensors


def draw_embeddings(random: Draw, prefix: str, config: Config, rows: int) -> dict[str, Tensor]:
    """Patch embedding with bias, and a position table of so many rows."""
    hidden, patch = config["hidden_size"], config["patch_size"]
    return {
        f"{prefix}embeddings.patch_embedding.weight": random.weight(hidden, 3, patch, patch),
        f"{prefix}embeddings.patch_embedding.bias": random.bias(hidden),
        f"{prefix}embeddings.position_embedding.weight": random.weight(rows, hidden),
    }


def embed_patches(pixels: Tensor, tensors: Tensors, name: str) -> Tensor:
    """Pixels [3, H, W] as patches [rows * columns, hidden]; a partial last row or column drops."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    patches = functional.conv2d(pixels[None], weight, bias, stride=weight.shape[-1])
    return patches[0].flatten(1).T


def run_layers(x: Tensor, tensors: Tensors, heads: int, act: str, eps: float) -> Tensor:
    """Pre-norm layers `encoder.layers.*` with full attention over x [rows, hidden]."""
    for layer in range(count_layers(tensors, "encoder.layers.")):
        part = below(tensors, f"encoder.layers.{layer}.")
        y = layer_norm(x, part, "layer_norm1", eps)
        query, key, value = (
            linear(y, part, f"self_attn.{name}_proj").unflatten(-1, (heads, -1)) for name in "qkv"
        )
        x = x + linear(attention(query, key, value), part, "self_attn.out_proj")
        y = activate(linear(layer_norm(x, part, "layer_norm2", eps), part, "mlp.fc1"), act)
        x = x + linear(y, part, "mlp.fc2")
    return x


def activate(x: Tensor, act: str) -> Tensor:
    """An activation by its name in configurations."""
    if act == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if act == "gelu_pytorch_tanh" else "none")
