"""Qwen3: Llama's block with norms of each head's queries and keys, and a head size of its own."""

from collections.abc import Mapping
from typing import Any, ClassVar

from services.decoder.models.config import DecoderConfig, read_config
from services.decoder.models.llama import Llama
from shared.checkpoint import Checkpoint


class Qwen3(Llama):
    """Yang et al., 2025."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_norms": True,
    }
    TENSORS: ClassVar[str] = Llama.TENSORS + r"|layers\.\d+\.self_attn\.[qk]_norm\.weight"

    @staticmethod
    def read_config(checkpoint: Checkpoint) -> DecoderConfig:
        """`attention_bias` is of all four attention layers, as in Llama."""
        given = checkpoint.text_config.get("attention_bias") or False
        return read_config(checkpoint, {**Qwen3.DEFAULTS, "attention_output_bias": given})
