"""Llama 3.2 Vision's decoder as config.json describes it."""

from dataclasses import dataclass
from typing import ClassVar

from services.families.mllama.sizes import item_rows, tile_rows
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.model_config.decoder import DecoderConfig, read_config, read_whole

# Of `MllamaTextConfig`.
_DEFAULTS = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
# Its class has no keys for these.
_FIXED = {
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "head_dim": None,
}
_ATTENDING = (3, 8, 13, 18, 23, 28, 33, 38)
_IDS_BESIDE = 8  # that have an embedding and no output, the picture's among them


@dataclass(frozen=True)
class MllamaConfig(DecoderConfig):
    """Layers `attending` attend to pictures of `item_rows` rows, `tile_rows` for each tile, instead of the text."""

    attends_to_media: ClassVar[bool] = True

    attending: frozenset[int]
    item_rows: int
    tile_rows: int
    num_ids: int  # that have an embedding


def read(checkpoint: Checkpoint) -> MllamaConfig:
    """Raises InvalidRequest as `read_config` does, and for a layer to attend that is not there."""
    config = read_config(checkpoint, _DEFAULTS, _FIXED)
    named = checkpoint.text_config.get("cross_attention_layers")
    if named is None:
        attending = {layer for layer in _ATTENDING if layer < config.num_layers}
    else:
        attending = {read_whole(checkpoint, "cross_attention_layers", layer) for layer in named}
    if not attending <= set(range(config.num_layers)):
        raise unsupported(
            checkpoint,
            f"cross_attention_layers is {sorted(attending)}, of {config.num_layers} layers",
        )
    return MllamaConfig(
        **vars(config),
        attending=frozenset(attending),
        item_rows=item_rows(checkpoint),
        tile_rows=tile_rows(checkpoint),
        num_ids=config.vocab_size + _IDS_BESIDE,
    )
