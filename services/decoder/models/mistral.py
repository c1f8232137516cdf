"""Mistral: Llama's block, every layer with a sliding window where the configuration has one."""

from collections.abc import Mapping
from typing import Any, ClassVar

from services.decoder.models.config import DecoderConfig, read_config
from services.decoder.models.llama import Llama
from shared.checkpoint import Checkpoint


class Mistral(Llama):
    """Jiang et al., 2023. Version 0.1 sees 4,096 tokens; later ones say `null`, and see all."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "max_window_layers": 0,
    }

    @staticmethod
    def read_config(checkpoint: Checkpoint) -> DecoderConfig:
        """A `sliding_window` that is left out is 4,096 tokens, one that is null is none."""
        window = checkpoint.text_config.get("sliding_window", 4096)
        defaults = {
            **Mistral.DEFAULTS,
            "sliding_window": window,
            "use_sliding_window": bool(window),
        }
        return read_config(checkpoint, defaults)
