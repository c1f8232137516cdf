"""DeepSeek-VL2's tower and projector on the kernels."""

from typing import Any

from torch import Tensor

from services.families.deepseek_vl2.network import folded
from services.families.deepseek_vl2.vision_config import VisionConfig
from services.vision_encoder.devices.cpu import ACTIVATIONS, TowerOps
from services.vision_encoder.towers.blocks import Block, patch_rows, run_blocks
from services.vision_encoder.towers.llava_tower import norm_of


class DeepSeekVL2Tower:
    """Tiles to rows. Takes the weights away from the network it is made of."""

    def __init__(self, network: Any, config: VisionConfig, ops: TowerOps) -> None:
        """network: that of the checkpoint, with its weights."""
        self._ops, self._config = ops, config
        vision = network.vision
        self._patches = ops.pack(vision.patch_embed["proj"])
        self._places = vision.pos_embed[0]
        self._blocks = [_block(ops, layer) for layer in vision.blocks]
        self._norm = norm_of(vision.norm)
        up, _, down = network.projector.layers
        self._up = ops.pack(up, epilogue=ACTIVATIONS["gelu"])
        self._down = ops.pack(down)

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        ops, config, count = self._ops, self._config, len(pixels)
        x = ops.linear(patch_rows(pixels, config.patch_size), self._patches)
        x = (x.view(count, len(self._places), -1) + self._places).flatten(0, 1)
        lengths = [len(self._places)] * count
        segments = ops.segments(lengths, config.heads, config.width // config.heads)
        shared = [segments] * len(self._blocks)
        states = run_blocks(ops, self._blocks, x, config.heads, shared)
        normed = ops.add_norm(None, states[len(self._blocks)], self._norm)
        squares = folded(normed.view(count, len(self._places), -1), config)
        projected = ops.linear(squares.flatten(0, 1).contiguous(), self._up)
        return ops.linear(projected, self._down).view(count, squares.shape[1], -1)


def _block(ops: TowerOps, layer: Any) -> Block:
    return Block(
        norm1=norm_of(layer.norm1),
        qkv=ops.pack(layer.attn.qkv),
        output=ops.pack(layer.attn.proj),
        norm2=norm_of(layer.norm2),
        up=ops.pack(layer.mlp["fc1"], epilogue=ACTIVATIONS["gelu_pytorch_tanh"]),
        down=ops.pack(layer.mlp["fc2"]),
    )
