"""Llama (Touvron et al., 2023) and its successors."""

from services.families.family import Family

FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    text_types=("llama",),
    decoder="services.decoder.models.llama:Llama",
    config="services.families.llama.config:read",
)
