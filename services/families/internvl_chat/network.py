"""InternViT (Chen et al., 2024) with InternVL's projector, in plain torch, under the checkpoint's names."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_DEFAULTS: dict[str, Any] = {
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 448,
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12_800,
    "num_hidden_layers": 48,
    "qkv_bias": False,
    "qk_normalization": True,
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
}
_NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class InternViTConfig:
    """Tower and projector. `layers`: how many lead to the state that is taken; `fold`: edge of the squares of patches
    that become one row; `swaps`: these rows are in the order of their columns (`ps_version` v1)."""

    image_size: int
    patch_size: int
    hidden_size: int
    heads: int
    inner: int
    layers: int
    qkv_bias: bool
    qk_norms: bool
    rms_norms: bool
    eps: float
    fold: int
    swaps: bool
    text_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "InternViTConfig":
        """Raises InvalidRequest for options that the tower does not have."""
        given = {**_DEFAULTS, **(checkpoint.vision_config or {})}
        config = checkpoint.config
        count = int(given["num_hidden_layers"])
        layer = int(config.get("select_layer", -1))
        taken = layer + count + 1 if layer < 0 else layer
        asked = {
            "hidden_act": given["hidden_act"] == "gelu",
            "num_channels": given["num_channels"] == 3,
            "norm_type": given["norm_type"] in _NORMS,
            "num_attention_heads": given["hidden_size"] % given["num_attention_heads"] == 0,
            "select_layer": 0 <= taken <= count,
        }
        if wrong := [key for key, served in asked.items() if not served]:
            raise InvalidRequest(
                "UNSUPPORTED_CONFIG",
                f"{checkpoint.folder / 'config.json'}: {wrong[0]}"
                f" {given.get(wrong[0], layer)!r} is not served",
                field="model",
            )
        return cls(
            image_size=int(given["image_size"]),
            patch_size=int(given["patch_size"]),
            hidden_size=int(given["hidden_size"]),
            heads=int(given["num_attention_heads"]),
            inner=int(given["intermediate_size"]),
            layers=taken,
            qkv_bias=bool(given["qkv_bias"]),
            qk_norms=bool(given["qk_normalization"]),
            rms_norms=given["norm_type"] == "rms_norm",
            eps=float(given["layer_norm_eps"]),
            fold=round(1 / float(config.get("downsample_ratio") or 0.5)),
            swaps=config.get("ps_version", "v1") == "v1",
            text_size=int(checkpoint.text_config["hidden_size"]),
        )


class InternViT(nn.Module):
    """Pixels [n, 3, side, side] to rows [n, rows, width of the language model]."""

    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        self.vision_model = _Tower(config)
        folded = config.hidden_size * config.fold**2
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(folded),
            nn.Linear(folded, config.text_size),
            nn.GELU(),
            nn.Linear(config.text_size, config.text_size),
        )
        self._config = config

    def forward(self, pixels: Tensor) -> Tensor:
        """All tiles at once."""
        rows: Tensor = self.mlp1(folded(self.vision_model(pixels)[:, 1:], self._config))
        return rows


def folded(x: Tensor, config: InternViTConfig) -> Tensor:
    """A map [n, patches, hidden] with squares of fold x fold patches as one row [n, rows, fold^2 * hidden], a square's
    patches row by row."""
    fold, side = config.fold, config.image_size // config.patch_size
    apart = x.unflatten(1, (side // fold, fold, side // fold, fold))
    order = (0, 3, 1, 2, 4, 5) if config.swaps else (0, 1, 3, 2, 4, 5)
    rows: Tensor = apart.permute(order).flatten(3).flatten(1, 2)
    return rows


class _Tower(nn.Module):
    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self._layers: list[nn.Module] = list(self.encoder.layers)

    def forward(self, pixels: Tensor) -> Tensor:
        rows: Tensor = self.embeddings(pixels)
        for layer in self._layers:
            rows = layer(rows)
        return rows


class _Embeddings(nn.Module):
    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        places = (config.image_size // patch) ** 2 + 1
        self.class_embedding = nn.Parameter(torch.empty(1, 1, hidden))
        self.patch_embedding = nn.Conv2d(3, hidden, patch, patch)
        self.position_embedding = nn.Parameter(torch.empty(1, places, hidden))

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(patches), -1, -1)
        rows: Tensor = torch.cat([first, patches], 1) + self.position_embedding
        return rows


class _Layer(nn.Module):
    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        norm = nn.RMSNorm if config.rms_norms else nn.LayerNorm
        hidden = config.hidden_size
        self.norm1, self.norm2 = norm(hidden, config.eps), norm(hidden, config.eps)
        self.attn = _Attention(config)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(hidden, config.inner), "fc2": nn.Linear(config.inner, hidden)}
        )
        self.ls1 = nn.Parameter(torch.empty(hidden))
        self.ls2 = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) * self.ls1
        inner = functional.gelu(self.mlp["fc1"](self.norm2(x)))
        rows: Tensor = x + self.mlp["fc2"](inner) * self.ls2
        return rows


class _Attention(nn.Module):
    """Queries and keys of all heads together may have an RMS norm each."""

    def __init__(self, config: InternViTConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=config.qkv_bias)
        self.proj = nn.Linear(hidden, hidden)
        if config.qk_norms:
            self.q_norm, self.k_norm = (nn.RMSNorm(hidden, config.eps) for _ in "qk")
        self._norms, self._heads = config.qk_norms, config.heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self._norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rows.unflatten(-1, (self._heads, -1)).transpose(1, 2) for rows in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return rows
