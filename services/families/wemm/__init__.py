"""WeMM-Chat-2K-CN and its siblings (WeChat, 2024): pictures of any shape before InternLM2 with partial LoRA."""

from services.families.family import Family

FAMILY = Family(
    architectures=(),
    config_keys=("spliter_emb_config", "downsampler_config"),
    text_types=("wemm",),
    prompt="services.families.wemm.prompt:WeMMRule",
    encoder="services.families.wemm.encoder:WeMMEncoder",
    decoder="services.families.internlm2.decoder:InternLM2",
    encoder_tensors=("vision_tower", "downsampler", "visual_source_spliter_emb"),
    config="services.families.internlm2.config:read",
    processor="services.families.wemm.sizes:processor",
    template="services.families.wemm.template:chat_template",
    template_first=True,
    stops="services.families.wemm.template:stops",
    sizes="services.families.wemm.sizes:largest",
)
