"""DeepSeek-VL2's tower, SigLIP (Zhai et al., 2023), and its projector."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.families.deepseek_vl2.vision_config import VisionConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, norm_of, patch_rows
from services.vision_encoder.towers.square_tower import SquareTower

_EPS = 1e-6


def deepseek_vl2_modules(config: VisionConfig) -> nn.Module:
    """The weights, by the names of checkpoints."""
    patch, width = config.patch_size, config.width
    vision = nn.ModuleDict(
        {
            "patch_embed": nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)}),
            "blocks": nn.ModuleList(_layer_modules(config) for _ in range(config.layers)),
            "norm": nn.LayerNorm(width, _EPS),
        }
    )
    vision.register_parameter("pos_embed", nn.Parameter(torch.empty(1, config.side**2, width)))
    layers = [
        nn.Linear(width * config.fold**2, config.between),
        nn.Identity(),  # the activation
        nn.Linear(config.between, config.text_size),
    ]
    projector = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    made = nn.ModuleDict({"vision": vision, "projector": projector})
    for name in ("image_newline", "view_seperator"):
        made.register_parameter(name, nn.Parameter(torch.empty(config.text_size)))
    return made


class DeepSeekVL2Tower:
    """Tiles to rows. Takes the weights away from the modules it is made of."""

    def __init__(self, modules: Any, config: VisionConfig, ops: TowerOps) -> None:
        """modules: those of `deepseek_vl2_modules`, with the checkpoint's weights."""
        self._ops, self._config = ops, config
        vision = modules.vision
        self._tower = SquareTower(
            ops,
            ops.pack(vision.patch_embed.proj),
            vision.pos_embed[0],
            [_block(ops, layer, config.heads) for layer in vision.blocks],
            config.heads,
        )
        self._norm = norm_of(vision.norm)
        up, _, down = modules.projector.layers
        self._up = ops.pack(up, activation="gelu")
        self._down = ops.pack(down)

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        ops, config = self._ops, self._config
        states = self._tower(patch_rows(pixels, config.patch_size))
        last = states[config.layers]
        normed = ops.norm(last.flatten(0, 1), self._norm)
        squares = folded(normed.view(last.shape), config)
        projected = ops.linear(squares.flatten(0, 1).contiguous(), self._up)
        return ops.linear(projected, self._down).view(*squares.shape[:2], -1)


def folded(x: Tensor, config: VisionConfig) -> Tensor:
    """A map [n, patches, width] with squares of fold x fold patches as one row [n, rows, width * fold^2], channel by
    channel, of each its patches. Zeros fill the last squares where the patches do not."""
    fold, side = config.fold, config.side
    line, missing = config.line, -side % fold
    whole = functional.pad(x.unflatten(1, (side, side)), (0, 0, 0, missing, 0, missing))
    apart = whole.unflatten(1, (line, fold)).unflatten(3, (line, fold))
    rows: Tensor = apart.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
    return rows


def _layer_modules(config: VisionConfig) -> nn.Module:
    width, inner = config.width, config.inner
    attention = {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
    return nn.ModuleDict(
        {
            "norm1": nn.LayerNorm(width, _EPS),
            "attn": nn.ModuleDict(attention),
            "norm2": nn.LayerNorm(width, _EPS),
            "mlp": nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)}),
        }
    )


def _block(ops: TowerOps, layer: Any, heads: int) -> Block:
    return Block(
        norm1=norm_of(layer.norm1),
        qkv=ops.pack_qkv(layer.attn.qkv, heads=heads),
        output=ops.pack_output(layer.attn.proj, heads),
        norm2=norm_of(layer.norm2),
        up=ops.pack(layer.mlp.fc1, activation="gelu_pytorch_tanh"),
        down=ops.pack(layer.mlp.fc2),
    )
