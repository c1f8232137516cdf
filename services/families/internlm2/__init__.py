"""InternLM2 (Cai et al., 2024): Llama's block under other names, queries, keys and values stored as one matrix."""

from services.families.family import Family

FAMILY = Family(
    architectures=("InternLM2ForCausalLM",),
    text_types=("internlm2",),
    decoder="services.families.internlm2.decoder:InternLM2",
    config="services.families.internlm2.config:read",
)
