"""DeepSeek-VL2's tower, SigLIP (Zhai et al., 2023), and its projector."""

from torch import Tensor
from torch.nn import functional

from services.families.deepseek_vl2.vision_config import VisionConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, load_norm, patch_rows
from services.vision_encoder.towers.square_tower import SquareTower
from shared.weights.named_weights import NamedWeights

_EPS = 1e-6
_PATCHES = "vision.patch_embed.proj"


class DeepSeekVL2Tower:
    """Tiles to rows."""

    def __init__(self, weights: NamedWeights, config: VisionConfig, ops: TowerOps) -> None:
        """weights: tensors by the names of checkpoints."""
        self._ops, self._config = ops, config
        patch, width = config.patch_size, config.width
        positions = weights.take("vision.pos_embed", 1, config.side**2, width)
        self._tower = SquareTower(
            ops,
            ops.pack(weights.take_convolution(_PATCHES, width, 3, patch, patch, bias=True)),
            ops.vector(positions[0]),
            [_block(weights, f"vision.blocks.{i}", config, ops) for i in range(config.layers)],
            config.heads,
        )
        self._norm = load_norm(weights, "vision.norm", width, _EPS, ops)
        folded_width, between = width * config.fold**2, config.between
        up = weights.take_linear("projector.layers.0", between, folded_width, True)
        down = weights.take_linear("projector.layers.2", config.text_size, between, True)
        self._up, self._down = ops.pack(up, "gelu"), ops.pack(down)

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


def _block(weights: NamedWeights, layer: str, config: VisionConfig, ops: TowerOps) -> Block:
    width, inner = config.width, config.inner
    up = weights.take_linear(f"{layer}.mlp.fc1", inner, width, True)
    qkv = weights.take_linear(f"{layer}.attn.qkv", 3 * width, width, True)
    output = weights.take_linear(f"{layer}.attn.proj", width, width, True)
    return Block(
        norm1=load_norm(weights, f"{layer}.norm1", width, _EPS, ops),
        qkv=ops.pack_qkv(qkv, config.heads),
        output=ops.pack_output(output, config.heads),
        norm2=load_norm(weights, f"{layer}.norm2", width, _EPS, ops),
        up=ops.pack(up, "gelu_pytorch_tanh"),
        down=ops.pack(weights.take_linear(f"{layer}.mlp.fc2", width, inner, True)),
    )
