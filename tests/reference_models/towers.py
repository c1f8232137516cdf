"""Vision towers with the tensor names that transformers gives CLIP, SigLIP and Idefics2."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
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
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


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


def draw_clip(random: Draw, prefix: str, config: Config, rows: int) -> dict[str, Tensor]:
    """CLIP's vision model without the last norm, with a position table of so many rows."""
    tensors = draw_embeddings(random, prefix, config, rows)
    del tensors[f"{prefix}embeddings.patch_embedding.bias"]
    tensors[f"{prefix}embeddings.class_embedding"] = random.bias(config["hidden_size"])
    tensors |= random.norm(f"{prefix}pre_layrnorm", config["hidden_size"])
    return tensors | draw_layers(random, prefix, config)


def clip_features(pixels: Tensor, tensors: Tensors, heads: int) -> Tensor:
    """CLIP's last hidden state [patches, hidden] before the last norm, without the class row."""
    patches = embed_patches(pixels, tensors, "embeddings.patch_embedding")
    x = torch.cat([tensors["embeddings.class_embedding"][None], patches])
    x = x + tensors["embeddings.position_embedding.weight"]
    x = layer_norm(x, tensors, "pre_layrnorm", 1e-5)
    return run_layers(x, tensors, heads, "quick_gelu", 1e-5)[1:]


def to_pixels(image: Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """An RGB image as [3, H, W]: divided by 255 and normalised, both in float32."""
    scaled = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (scaled - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
