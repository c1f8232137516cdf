"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) towers with LLaVA's projector, in plain torch.

Modules have the names of the checkpoint's tensors. Layers above the last hidden state that is taken are left out.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.model_config.llava import LlavaConfig, TowerConfig

_gelu_tanh = partial(functional.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# By transformers' names.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


class LlavaNetwork(nn.Module):
    """Pixels [n, channels, side, side] to rows [n, rows, width of the language model]."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self._layers, self._drops_first = config.layers, config.drops_first
        self.tower = Tower(config.tower, max(config.layers))
        self.projector = _Projector(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """All squares at once."""
        states = self.tower(pixels)
        taken = torch.cat([states[layer] for layer in self._layers], dim=-1)
        rows: Tensor = self.projector(taken[:, 1:] if self._drops_first else taken)
        return rows


class Tower(nn.Module):
    """CLIP or SigLIP up to a layer."""

    def __init__(self, config: TowerConfig, layers: int) -> None:
        """layers: how many of them run."""
        super().__init__()
        self.embeddings = _Embeddings(config)
        if config.is_clip:
            self.pre_layrnorm = nn.LayerNorm(config.hidden_size, config.eps)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(_Layer(config) for _ in range(layers))
        self._blocks: list[nn.Module] = list(self.encoder.layers)
        self._is_clip = config.is_clip

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """All hidden states: what enters the first layer, then what leaves each."""
        x = self.embeddings(pixels)
        states = [self.pre_layrnorm(x) if self._is_clip else x]
        for layer in self._blocks:
            states.append(layer(states[-1]))
        return states


class _Embeddings(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(
            config.num_channels, hidden, patch, patch, bias=not config.is_clip
        )
        places = (config.image_size // patch) ** 2 + config.is_clip
        self.position_embedding = _Table(places, hidden)
        if config.is_clip:
            self.class_embedding = nn.Parameter(torch.empty(hidden))
        self._is_clip = config.is_clip

    def forward(self, pixels: Tensor) -> Tensor:
        x: Tensor = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        if self._is_clip:
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        return x + self.position_embedding.weight


class _Table(nn.Module):
    """As `nn.Embedding`, which draws random rows at first: on the meta device torch imports its compiler for that."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))


class _Layer(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer_norm1 = nn.LayerNorm(hidden, config.eps)
        self.self_attn = _Attention(hidden, config.num_heads)
        self.layer_norm2 = nn.LayerNorm(hidden, config.eps)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        rows: Tensor = x + self.mlp(self.layer_norm2(x))
        return rows


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return rows


class _Mlp(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.fc2(self._activation(self.fc1(x)))
        return rows


class _Projector(nn.Module):
    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        inputs, size = config.tower.hidden_size * len(config.layers), config.text_size
        self.linear_1 = nn.Linear(inputs, size, bias=config.projector_bias)
        self.linear_2 = nn.Linear(size, size, bias=config.projector_bias)
        self._activation = _ACTIVATIONS[config.projector_activation]

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.linear_2(self._activation(self.linear_1(x)))
        return rows
