"""InternLM2: Llama's block under other names; of the fused matrix each key head has its queries, its key, its value."""

from services.decoder.loading.weights import canonical_name
from services.decoder.models.llama import Llama

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


class InternLM2(Llama):
    """Cai et al., 2024."""

    @staticmethod
    def canonical(name: str) -> str:
        """See `Llama.canonical`."""
        name = canonical_name(name).removeprefix("language_model.")
        name = name.replace("output.", "lm_head.", 1) if name.startswith("output.") else name
        for stored, canonical in _NAMES.items():
            name = name.replace(stored, canonical)
        return name
