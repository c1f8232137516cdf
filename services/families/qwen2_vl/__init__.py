"""Qwen2-VL (Wang et al., 2024): pictures and videos of any size, rotary positions of three axes."""

from services.families.family import Family
from tessera.common.v1.media_pb2 import Modality

FAMILY = Family(
    architectures=("Qwen2VLForConditionalGeneration",),
    text_types=("qwen2_vl", "qwen2_vl_text"),
    prompt="services.families.qwen2_vl.prompt:Qwen2VLRule",
    encoder="services.families.qwen2_vl.encoder:Qwen2VLEncoder",
    encoder_tensors=("visual",),
    decoder="services.families.qwen2_vl.decoder:Qwen2VL",
    config="services.families.qwen2_vl.config:read",
    sizes="services.families.qwen2_vl.sizes:largest",
    takes=(Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO),
)
