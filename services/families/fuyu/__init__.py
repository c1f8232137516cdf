"""Fuyu (Adept, 2023): patches of a picture before a prompt, through one linear layer. Its decoder, Persimmon, is
transformers' code."""

from services.families.family import Family

FAMILY = Family(
    architectures=("FuyuForCausalLM",),
    prompt="services.families.fuyu.prompt:FuyuRule",
    encoder="services.families.fuyu.encoder:FuyuEncoder",
    encoder_tensors=("vision_embed_tokens",),
    processor="services.families.fuyu.sizes:processor",
    template="services.families.fuyu.template:chat_template",
    stops="services.families.fuyu.template:stops",
    sizes="services.families.fuyu.sizes:largest",
)
