"""Qwen3 (Yang et al., 2025): Llama's block with norms of each head's queries and keys."""

from services.families.family import Family

FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    text_types=("qwen3",),
    decoder="services.decoder.models.llama:Llama",
    config="services.families.qwen3.config:read",
)
