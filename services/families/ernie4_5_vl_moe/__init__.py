"""ERNIE 4.5 VL (Baidu, 2025): experts of their own for the tokens of pictures. The code is transformers'."""

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family

FAMILY = Family(
    architectures=("Ernie4_5_VLMoeForConditionalGeneration",),
    prompt=GENERIC_PROMPT,
    encoder=GENERIC_ENCODER,
    encoder_tensors=("vision_tower", "resampler_model"),
    sizes="services.families.generic_media:largest",
    overrides={"prompt_marks": "services.families.ernie4_5_vl_moe.generic:prompt_marks"},
)
