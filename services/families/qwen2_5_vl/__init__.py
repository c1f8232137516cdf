"""Qwen2.5-VL (Bai et al., 2025): Qwen2-VL with a windowed tower and positions that follow a video's seconds."""

from services.families.family import Family
from tessera.common.v1.media_pb2 import Modality

FAMILY = Family(
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    text_types=("qwen2_5_vl", "qwen2_5_vl_text"),
    prompt="services.families.qwen2_vl.prompt:Qwen2VLRule",
    encoder="services.families.qwen2_5_vl.encoder:Qwen2_5VLEncoder",
    encoder_tensors=("visual",),
    decoder="services.families.qwen2_5_vl.decoder:Qwen2_5VL",
    config="services.families.qwen2_vl.config:read",
    sizes="services.families.qwen2_vl.sizes:largest",
    takes=(Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO),
)
