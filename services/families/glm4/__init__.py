"""GLM-4-0414 (Z.ai, 2025): GLM's block with norms behind attention and MLP."""

from services.families.family import Family

FAMILY = Family(
    architectures=("Glm4ForCausalLM",),
    text_types=("glm4",),
    decoder="services.decoder.models.llama:Llama",
    config="services.families.glm4.config:read",
)
