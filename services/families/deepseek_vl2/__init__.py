"""DeepSeek-VL2 (Wu et al., 2024): SigLIP over a picture's tiles before a DeepSeek-V2 or -V3 text model, whose code is
transformers'."""

from services.families.family import Family

FAMILY = Family(
    architectures=(),
    config_keys=("language_config", "projector_config", "candidate_resolutions"),
    text_types=("deepseek_v2", "deepseek_v3"),
    prompt="services.families.deepseek_vl2.prompt:DeepSeekVL2Rule",
    encoder="services.families.deepseek_vl2.encoder:DeepSeekVL2Encoder",
    decoder="services.families.deepseek_vl2.generic:DeepSeekVL2Decoder",
    encoder_tensors=("vision", "projector", "image_newline", "view_seperator"),
    config="services.families.deepseek_vl2.text_model:read",
    processor="services.families.deepseek_vl2.sizes:processor",
    template="services.families.deepseek_vl2.template:chat_template",
    template_first=True,
    stops="services.families.deepseek_vl2.template:stops",
    sizes="services.families.deepseek_vl2.sizes:largest",
)
