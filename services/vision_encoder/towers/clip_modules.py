"""The weights of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) towers, by the names of checkpoints."""

import torch
from torch import nn

from shared.model_config.llava import TowerConfig


def clip_modules(config: TowerConfig, layers: int) -> nn.ModuleDict:
    """Of a tower up to a layer; what follows the last one is left out."""
    parts: dict[str, nn.Module] = {
        "embeddings": _embeddings(config),
        "encoder": nn.ModuleDict({"layers": nn.ModuleList(_layer(config) for _ in range(layers))}),
    }
    if config.is_clip:
        parts["pre_layrnorm"] = nn.LayerNorm(config.hidden_size, config.eps)
    return nn.ModuleDict(parts)


class Table(nn.Module):
    """As `nn.Embedding`, which draws random rows at first: on the meta device torch imports its compiler for that."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))


def _embeddings(config: TowerConfig) -> nn.Module:
    hidden, patch = config.hidden_size, config.patch_size
    places = (config.image_size // patch) ** 2 + config.is_clip
    made = nn.ModuleDict(
        {
            "patch_embedding": nn.Conv2d(
                config.num_channels, hidden, patch, patch, bias=not config.is_clip
            ),
            "position_embedding": Table(places, hidden),
        }
    )
    if config.is_clip:
        made.register_parameter("class_embedding", nn.Parameter(torch.empty(hidden)))
    return made


def _layer(config: TowerConfig) -> nn.Module:
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = ("q_proj", "k_proj", "v_proj", "out_proj")
    return nn.ModuleDict(
        {
            "layer_norm1": nn.LayerNorm(hidden, config.eps),
            "self_attn": nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in linears}),
            "layer_norm2": nn.LayerNorm(hidden, config.eps),
            "mlp": nn.ModuleDict(
                {"fc1": nn.Linear(hidden, inner), "fc2": nn.Linear(inner, hidden)}
            ),
        }
    )
