"""InternLM2: Llama's block under other names; of the fused matrix each key head has its queries, its key, its value.

With partial LoRA, where a checkpoint has it (InternLM-XComposer2, WeMM).
"""

from typing import ClassVar

from services.decoder.language_weights import LanguageWeights, canonical_name
from services.decoder.models.adapters import Adapter
from services.decoder.models.llama import Llama
from services.decoder.models.plora import load_adapter, scales
from shared.checkpoint.folder import Checkpoint

_NAMES = {
    "tok_embeddings.": "embed_tokens.",
    "attention.wqkv": "self_attn.qkv_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_INFIX = "original_linear."  # before the weight that partial LoRA was trained beside, in checkpoints of WeMM


class InternLM2(Llama):
    """Cai et al., 2024."""

    TENSORS: ClassVar[str] = (
        rf"{Llama.TENSORS}"
        r"|layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate|up|down)_proj)\.Plora_[AB]\.weight"
    )

    @staticmethod
    def canonical(name: str) -> str:
        """See `Llama.canonical`."""
        name = canonical_name(name).removeprefix("language_model.")
        name = name.replace("output.", "lm_head.", 1) if name.startswith("output.") else name
        for stored, canonical in _NAMES.items():
            name = name.replace(stored, canonical)
        return name.replace(_INFIX, "")

    def load_media_adapter(
        self, weights: LanguageWeights, checkpoint: Checkpoint
    ) -> Adapter | None:
        """See `Llama.load_media_adapter`."""
        if not any("Plora_" in name for name in weights):
            return None
        return load_adapter(weights, self.config, self._ops, scales(checkpoint))
