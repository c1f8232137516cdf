"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's block with biases of queries, keys and values."""

from services.families.family import Family

FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    text_types=("qwen2",),
    decoder="services.decoder.models.llama:Llama",
    config="services.families.qwen2.config:read",
)
