"""Qwen2.5-VL's tower: Qwen2-VL's with RMS norms, a gate and windows in most layers."""

from typing import Any, ClassVar

from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding

from services.families.qwen2_vl.encoder import Qwen2VLEncoder


class Qwen2_5VLEncoder(Qwen2VLEncoder):
    """Tower and merger of one checkpoint."""

    config_class: ClassVar[Any] = Qwen2_5_VLConfig
    rotary_class: ClassVar[Any] = Qwen2_5_VLVisionRotaryEmbedding
