"""Qwen: Llama's block under other names, with biases of queries, keys and values, which are stored as one matrix."""

from typing import ClassVar

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.llama import Llama
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_NAMES = {
    "wte.": "embed_tokens.",
    "ln_f.": "norm.",
    "h.": "layers.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".attn.c_attn.": ".self_attn.qkv_proj.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    ".mlp.w1.": ".mlp.up_proj.",
    ".mlp.w2.": ".mlp.gate_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}


class Qwen(Llama):
    """Bai et al., 2023."""

    IGNORED: ClassVar[str] = r".*(rotary_emb\.inv_freq|attn\.(masked_)?bias)"

    @staticmethod
    def canonical(name: str) -> str:
        """See `Llama.canonical`."""
        name = name.removeprefix("transformer.")
        for stored, canonical in _NAMES.items():
            if stored.startswith("."):
                name = name.replace(stored, canonical)
            elif name.startswith(stored):
                name = canonical + name.removeprefix(stored)
        return name

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> "Llama":
        """See `Llama.load`. Raises InvalidRequest for texts beyond the trained length, where Qwen scales by the length
        of the running text, which a cache shared between sequences cannot."""
        longest = registry.decoder_config(checkpoint).max_position_embeddings
        scaled = [
            key for key in ("use_dynamic_ntk", "use_logn_attn") if checkpoint.text_config.get(key)
        ]
        if scaled and max_model_len > longest:
            raise InvalidRequest(
                "UNSUPPORTED_CONFIG",
                f"--max-model-len {max_model_len} is beyond the {longest} tokens of seq_length, where"
                f" {' and '.join(scaled)} would change the text before it: lower it",
                field="max_model_len",
            )
        return super().load(checkpoint, ops, max_model_len)
