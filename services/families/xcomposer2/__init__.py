"""InternLM-XComposer2-VL and -4KHD (Dong et al., 2024): CLIP before InternLM2 with partial LoRA."""

from services.families.family import Family

FAMILY = Family(
    architectures=("InternLMXComposer2ForCausalLM",),
    prompt="services.families.xcomposer2.prompt:XComposer2Rule",
    encoder="services.families.xcomposer2.encoder:XComposer2Encoder",
    encoder_tensors=("vit", "vision_proj", "plora_glb_gn", "plora_sub_gn"),
    sizes="services.families.xcomposer2.sizes:largest",
    processor="services.families.xcomposer2.sizes:processor",
    template="services.families.xcomposer2.template:chat_template",
)
