"""Qwen2 and Qwen2.5: Llama's block with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any, ClassVar

from services.decoder.models.config import DecoderConfig, read_config
from services.decoder.models.llama import Llama
from shared.checkpoint import Checkpoint


class Qwen2(Llama):
    """Yang et al., 2024."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_output_bias": False,
        "mlp_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @staticmethod
    def read_config(checkpoint: Checkpoint) -> DecoderConfig:
        """Layers from `max_window_layers` on have sliding windows where `use_sliding_window` says so."""
        return read_config(checkpoint, Qwen2.DEFAULTS)
