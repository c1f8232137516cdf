"""Qwen3: Llama's block with norms of each head's queries and keys, and a head size of its own."""

from typing import ClassVar

from services.decoder.models.llama import Llama


class Qwen3(Llama):
    """Yang et al., 2025."""

    TENSORS: ClassVar[str] = Llama.TENSORS + r"|layers\.\d+\.self_attn\.[qk]_norm\.weight"
