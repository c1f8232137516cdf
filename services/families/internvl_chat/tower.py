"""InternViT (Chen et al., 2024) with InternVL's projector."""

from torch import Tensor

from services.families.internvl_chat.vision_config import InternViTConfig
from services.vision_encoder.devices.base.ops import Norm, TowerOps
from services.vision_encoder.towers.blocks import Block, load_norm, patch_rows
from services.vision_encoder.towers.square_tower import SquareTower
from shared.weights.linear_weight import LinearWeight
from shared.weights.named_weights import NamedWeights

_TOWER = "vision_model"
_EMBEDDINGS = f"{_TOWER}.embeddings"
_PATCHES = f"{_EMBEDDINGS}.patch_embedding"
_PROJECTOR_EPS = 1e-5


class InternViTTower:
    """Tiles to rows."""

    def __init__(self, weights: NamedWeights, config: InternViTConfig, ops: TowerOps) -> None:
        """weights: tensors by the names of checkpoints."""
        self._ops, self._config = ops, config
        hidden, patch, size = config.hidden_size, config.patch_size, config.text_size
        places = (config.image_size // patch) ** 2 + 1
        positions = weights.take(f"{_EMBEDDINGS}.position_embedding", 1, places, hidden)
        first = weights.take(f"{_EMBEDDINGS}.class_embedding", 1, 1, hidden)
        kernel = (3, patch, patch)
        layers = f"{_TOWER}.encoder.layers"
        self._tower = SquareTower(
            ops,
            ops.pack(weights.take_convolution(_PATCHES, hidden, *kernel, bias=True)),
            ops.vector(positions[0]),
            [_block(weights, f"{layers}.{i}", config, ops) for i in range(config.layers)],
            config.heads,
            class_row=ops.vector(first[0, 0]),
        )
        wide = hidden * config.fold**2
        self._norm = load_norm(weights, "mlp1.0", wide, _PROJECTOR_EPS, ops)
        self._up = ops.pack(weights.take_linear("mlp1.1", size, wide, True), "gelu")
        self._down = ops.pack(weights.take_linear("mlp1.3", size, size, True))

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


def _block(weights: NamedWeights, layer: str, config: InternViTConfig, ops: TowerOps) -> Block:
    hidden, inner, heads = config.hidden_size, config.inner, config.heads
    attention, mlp = f"{layer}.attn", f"{layer}.mlp"

    def norm(name: str) -> Norm:
        return load_norm(weights, f"{layer}.{name}", hidden, config.eps, ops, not config.rms_norms)

    def head_norm(name: str) -> Norm:
        return ops.head_norm(
            load_norm(weights, f"{attention}.{name}", hidden, config.eps, ops, bias=False), heads
        )

    def branch(name: str, inputs: int, scale: str) -> LinearWeight:
        """What scales a branch of the layer is part of its last matrix here."""
        factors = weights.take(f"{layer}.{scale}", hidden).to(ops.dtype)
        return weights.take_linear(name, hidden, inputs, True).scaled(factors)

    qkv = weights.take_linear(f"{attention}.qkv", 3 * hidden, hidden, config.qkv_bias)
    return Block(
        norm1=norm("norm1"),
        qkv=ops.pack_qkv(qkv, heads),
        output=ops.pack_output(branch(f"{attention}.proj", hidden, "ls1"), heads),
        norm2=norm("norm2"),
        up=ops.pack(weights.take_linear(f"{mlp}.fc1", inner, hidden, True), "gelu"),
        down=ops.pack(branch(f"{mlp}.fc2", inner, "ls2")),
        head_norms=(head_norm("q_norm"), head_norm("k_norm")) if config.qk_norms else None,
    )
