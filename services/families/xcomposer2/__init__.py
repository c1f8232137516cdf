"""InternLM-XComposer2-VL and -4KHD (Dong et al., 2024): CLIP before InternLM2 with partial LoRA."""

from services.families.family import Family

FAMILY = Family(
    architectures=("InternLMXComposer2ForCausalLM",),
    text_types=("internlmxcomposer2",),  # in some releases; others say internlm2
    prompt="services.families.xcomposer2.prompt:XComposer2Rule",
    decoder="services.families.internlm2.decoder:InternLM2",
    config="services.families.internlm2.config:read",
    encoder="services.families.xcomposer2.encoder:XComposer2Encoder",
    encoder_tensors=(
        *("vit", "vision_proj"),
        *("plora_glb_GN", "plora_sub_GN", "plora_glb_gn", "plora_sub_gn"),
    ),
    sizes="services.families.xcomposer2.sizes:largest",
    processor="services.families.xcomposer2.sizes:processor",
    template="services.families.xcomposer2.template:chat_template",
    stops="services.families.xcomposer2.template:stops",
)
