"""ChatGLM2 and its successors: Llama's block under other names, queries, keys and values stored as one matrix."""

import re
from typing import ClassVar

from services.decoder.models.llama import Llama

_PREFIX = re.compile(r"transformer\.(encoder\.)?")
_NAMES = {
    "embedding.word_embeddings": "embed_tokens",
    "output_layer": "lm_head",
    "final_layernorm": "norm",
    "self_attention.query_key_value": "self_attn.qkv_proj",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


class ChatGLM(Llama):
    """GLM team, 2024. Half of each head is rotated, in pairs of neighbours."""

    IGNORED: ClassVar[str] = r".*rotary_pos_emb\.inv_freq"

    @staticmethod
    def canonical(name: str) -> str:
        """See `Llama.canonical`."""
        name = _PREFIX.sub("", name, count=1)
        for stored, canonical in _NAMES.items():
            name = name.replace(stored, canonical)
        return name
