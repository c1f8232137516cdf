"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) towers, up to a layer."""

from torch import Tensor

from services.vision_encoder.devices.base.ops import Packed, TowerOps
from services.vision_encoder.towers.blocks import Block, load_norm
from services.vision_encoder.towers.square_tower import SquareTower
from shared.model_config.llava import TowerConfig
from shared.weights.linear_weight import StackedWeight
from shared.weights.named_weights import NamedWeights

_EMBEDDINGS = "tower.embeddings"


def clip_tower(
    weights: NamedWeights, config: TowerConfig, layers: int, ops: TowerOps
) -> SquareTower:
    """The first `layers` layers and what enters them, of the tensors `tower`.X."""
    size, eps = config.hidden_size, config.eps
    first = norm = None
    if config.is_clip:
        first = ops.vector(weights.take(f"{_EMBEDDINGS}.class_embedding", size))
        norm = load_norm(weights, "tower.pre_layrnorm", size, eps, ops)
    return SquareTower(
        ops,
        clip_patches(weights, config, ops),
        clip_positions(weights, config, ops),
        clip_blocks(weights, config, layers, ops),
        config.num_heads,
        class_row=first,
        norm=norm,
    )


def clip_patches(weights: NamedWeights, config: TowerConfig, ops: TowerOps) -> Packed:
    """From the values of patches to their rows."""
    name, patch = f"{_EMBEDDINGS}.patch_embedding", config.patch_size
    kernel = (config.num_channels, patch, patch)
    return ops.pack(
        weights.take_convolution(name, config.hidden_size, *kernel, bias=not config.is_clip)
    )


def clip_positions(weights: NamedWeights, config: TowerConfig, ops: TowerOps) -> Tensor:
    """[places, hidden], of CLIP the class row's before those of patches."""
    places = (config.image_size // config.patch_size) ** 2 + config.is_clip
    name = f"{_EMBEDDINGS}.position_embedding.weight"
    return ops.vector(weights.take(name, places, config.hidden_size))


def clip_blocks(
    weights: NamedWeights, config: TowerConfig, layers: int, ops: TowerOps
) -> list[Block]:
    """The first `layers` layers alone."""
    return [_block(weights, f"tower.encoder.layers.{i}", config, ops) for i in range(layers)]


def _block(weights: NamedWeights, layer: str, config: TowerConfig, ops: TowerOps) -> Block:
    size, inner, eps = config.hidden_size, config.intermediate_size, config.eps
    heads, attention = config.num_heads, f"{layer}.self_attn"
    qkv = [weights.take_linear(f"{attention}.{name}_proj", size, size, True) for name in "qkv"]
    output = weights.take_linear(f"{attention}.out_proj", size, size, True)
    up = weights.take_linear(f"{layer}.mlp.fc1", inner, size, True)
    return Block(
        norm1=load_norm(weights, f"{layer}.layer_norm1", size, eps, ops),
        qkv=ops.pack_qkv(StackedWeight(qkv), heads),
        output=ops.pack_output(output, heads),
        norm2=load_norm(weights, f"{layer}.layer_norm2", size, eps, ops),
        up=ops.pack(up, config.activation),
        down=ops.pack(weights.take_linear(f"{layer}.mlp.fc2", size, inner, True)),
    )
