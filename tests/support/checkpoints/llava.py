"""LLaVA 1.5 with a CLIP or a SigLIP tower."""

from support.checkpoints.options import (
    CHAT_TEMPLATE,
    CheckpointOptions,
    text_config,
    vision_sizes,
)
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The model, not yet randomised, and its processor."""
    vision, images, class_tokens = _clip(chosen) if chosen.tower == "clip" else _siglip(chosen)
    strategy = "default" if chosen.tower == "clip" else "full"
    text = text_config(chosen.language, chosen, words)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-2 if chosen.tower == "clip" else -1,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=class_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    return LlavaForConditionalGeneration(config), processor


def respelt(name: str, spelling: str) -> str:
    """A tensor's name as `CheckpointOptions.spelling` says."""
    if spelling == "old":
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name if name == "lm_head.weight" else f"model.{name}"


def _clip(chosen: CheckpointOptions) -> tuple[CLIPVisionConfig, CLIPImageProcessorPil, int]:
    """4x4 patches and a class token."""
    sizes = vision_sizes(image_size=56, patch_size=14, projection_dim=32)
    vision = CLIPVisionConfig(**{**sizes, **chosen.vision})
    size = vision.image_size
    images = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )
    return vision, images, 1


def _siglip(chosen: CheckpointOptions) -> tuple[SiglipVisionConfig, SiglipImageProcessorPil, int]:
    """3x3 patches, no class token."""
    sizes = vision_sizes(image_size=48, patch_size=16, vision_use_head=False)
    vision = SiglipVisionConfig(**{**sizes, **chosen.vision})
    images = SiglipImageProcessorPil(size={"height": vision.image_size, "width": vision.image_size})
    return vision, images, 0
