"""GLM (GLM team, 2024): Llama's block with half of each head rotated, in pairs of neighbours."""

from services.families.family import Family

FAMILY = Family(
    architectures=("GlmForCausalLM",),
    text_types=("glm",),
    decoder="services.decoder.models.llama:Llama",
    config="services.families.glm.config:read",
)
