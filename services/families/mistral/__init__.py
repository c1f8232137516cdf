"""Mistral (Jiang et al., 2023): Llama's block with a sliding window."""

from services.families.family import Family

FAMILY = Family(
    architectures=("MistralForCausalLM",),
    text_types=("mistral",),
    decoder="services.decoder.models.llama:Llama",
    config="services.families.mistral.config:read",
)
