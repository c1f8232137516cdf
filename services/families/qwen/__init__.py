"""Qwen (Bai et al., 2023): Qwen2's block under other names."""

from services.families.family import Family

FAMILY = Family(
    architectures=("QWenLMHeadModel",),
    text_types=("qwen",),
    decoder="services.families.qwen.decoder:Qwen",
    config="services.families.qwen.config:read",
    template="services.families.qwen.template:chat_template",
    stops="services.families.qwen.template:stops",
    clean_up="services.families.qwen.template:clean_up",
)
