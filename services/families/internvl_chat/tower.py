"""InternViT (Chen et al., 2024) with InternVL's projector."""

from typing import Any

import torch
from torch import Tensor, nn

from services.families.internvl_chat.vision_config import InternViTConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, norm_of, patch_rows
from services.vision_encoder.towers.square_tower import SquareTower


def internvl_modules(config: InternViTConfig) -> nn.Module:
    """The weights, by the names of checkpoints."""
    hidden, patch = config.hidden_size, config.patch_size
    places = (config.image_size // patch) ** 2 + 1
    embeddings = nn.ModuleDict({"patch_embedding": nn.Conv2d(3, hidden, patch, patch)})
    for name, count in (("class_embedding", 1), ("position_embedding", places)):
        embeddings.register_parameter(name, nn.Parameter(torch.empty(1, count, hidden)))
    layers = nn.ModuleList(_layer_modules(config) for _ in range(config.layers))
    tower = {"embeddings": embeddings, "encoder": nn.ModuleDict({"layers": layers})}
    wide, size = hidden * config.fold**2, config.text_size
    projector = [
        nn.LayerNorm(wide),
        nn.Linear(wide, size),
        nn.Identity(),  # the activation
        nn.Linear(size, size),
    ]
    return nn.ModuleDict({"vision_model": nn.ModuleDict(tower), "mlp1": nn.ModuleList(projector)})


class InternViTTower:
    """Tiles to rows. Takes the weights away from the modules it is made of."""

    def __init__(self, modules: Any, config: InternViTConfig, ops: TowerOps) -> None:
        """modules: those of `internvl_modules`, with the checkpoint's weights."""
        self._ops, self._config = ops, config
        embeddings = modules.vision_model.embeddings
        self._tower = SquareTower(
            ops,
            ops.pack(embeddings.patch_embedding),
            embeddings.position_embedding[0],
            [_block(ops, layer, config) for layer in modules.vision_model.encoder.layers],
            config.heads,
            class_row=embeddings.class_embedding[0, 0],
        )
        norm, up, _, down = modules.mlp1
        self._norm = norm_of(norm)
        self._up = ops.pack(up, activation="gelu")
        self._down = ops.pack(down)

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        ops, config = self._ops, self._config
        states = self._tower(patch_rows(pixels, config.patch_size))
        squares = folded(states[config.layers][:, 1:], config)
        normed = ops.norm(squares.flatten(0, 1).contiguous(), self._norm)
        projected = ops.linear(ops.linear(normed, self._up), self._down)
        return projected.view(*squares.shape[:2], -1)


def folded(x: Tensor, config: InternViTConfig) -> Tensor:
    """A map [n, patches, hidden] with squares of fold x fold patches as one row [n, rows, fold^2 * hidden], a square's
    patches row by row."""
    fold, side = config.fold, config.image_size // config.patch_size
    apart = x.unflatten(1, (side // fold, fold, side // fold, fold))
    order = (0, 3, 1, 2, 4, 5) if config.swaps else (0, 1, 3, 2, 4, 5)
    rows: Tensor = apart.permute(order).flatten(3).flatten(1, 2)
    return rows


def _layer_modules(config: InternViTConfig) -> nn.Module:
    norm = nn.RMSNorm if config.rms_norms else nn.LayerNorm
    hidden, inner = config.hidden_size, config.inner
    attention: dict[str, nn.Module] = {
        "qkv": nn.Linear(hidden, 3 * hidden, bias=config.qkv_bias),
        "proj": nn.Linear(hidden, hidden),
    }
    if config.qk_norms:
        attention |= {name: nn.RMSNorm(hidden, config.eps) for name in ("q_norm", "k_norm")}
    made = nn.ModuleDict(
        {
            "norm1": norm(hidden, config.eps),
            "norm2": norm(hidden, config.eps),
            "attn": nn.ModuleDict(attention),
            "mlp": nn.ModuleDict(
                {"fc1": nn.Linear(hidden, inner), "fc2": nn.Linear(inner, hidden)}
            ),
        }
    )
    for name in ("ls1", "ls2"):
        made.register_parameter(name, nn.Parameter(torch.empty(hidden)))
    return made


def _block(ops: TowerOps, layer: Any, config: InternViTConfig) -> Block:
    attention, mlp = layer.attn, layer.mlp
    # What scales a branch of the layer is part of its last matrix here.
    for linear, scale in ((attention.proj, layer.ls1), (mlp.fc2, layer.ls2)):
        linear.weight.mul_(scale[:, None])
        linear.bias.mul_(scale)
    norms = None
    if config.qk_norms:
        q_norm, k_norm = norm_of(attention.q_norm), norm_of(attention.k_norm)
        norms = (ops.head_norm(q_norm, config.heads), ops.head_norm(k_norm, config.heads))
    return Block(
        norm1=norm_of(layer.norm1),
        qkv=ops.pack_qkv(attention.qkv, heads=config.heads),
        output=ops.pack_output(attention.proj, config.heads),
        norm2=norm_of(layer.norm2),
        up=ops.pack(mlp.fc1, activation="gelu"),
        down=ops.pack(mlp.fc2),
        head_norms=norms,
    )
