"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) towers, up to a layer."""

from typing import Any

from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, norm_of
from services.vision_encoder.towers.square_tower import SquareTower
from shared.model_config.llava import TowerConfig


def clip_tower(ops: TowerOps, modules: Any, config: TowerConfig) -> SquareTower:
    """The tower of `clip_modules`, whose weights it takes away."""
    embeddings = modules.embeddings
    return SquareTower(
        ops,
        ops.pack(embeddings.patch_embedding),
        embeddings.position_embedding.weight,
        clip_blocks(ops, modules.encoder.layers, config),
        config.num_heads,
        class_row=embeddings.class_embedding if config.is_clip else None,
        norm=norm_of(modules.pre_layrnorm) if config.is_clip else None,
    )


def clip_blocks(ops: TowerOps, layers: Any, config: TowerConfig) -> list[Block]:
    """Its layers alone."""
    heads = config.num_heads
    return [
        Block(
            norm1=norm_of(layer.layer_norm1),
            qkv=ops.pack_qkv(
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                heads=heads,
            ),
            output=ops.pack_output(layer.self_attn.out_proj, heads),
            norm2=norm_of(layer.layer_norm2),
            up=ops.pack(layer.mlp.fc1, activation=config.activation),
            down=ops.pack(layer.mlp.fc2),
        )
        for layer in layers
    ]
