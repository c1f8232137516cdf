"""Qwen-VL (Bai et al., 2023): every picture as 256 rows of a resampler, before Qwen."""

from services.families.family import Family

FAMILY = Family(
    architectures=("QWenLMHeadModel",),
    config_keys=("visual",),
    prompt="services.families.qwen_vl.prompt:QwenVLRule",
    encoder="services.families.qwen_vl.encoder:QwenVLEncoder",
    encoder_tensors=("transformer.visual",),
    sizes="services.families.qwen_vl.sizes:largest",
    processor="services.families.qwen_vl.sizes:processor",
    template="services.families.qwen.template:chat_template",
    stops="services.families.qwen.template:stops",
    clean_up="services.families.qwen.template:clean_up",
)
