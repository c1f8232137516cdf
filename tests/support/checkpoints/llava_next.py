"""LLaVA-NeXT with a CLIP or a SigLIP tower: squares of 4x4 or 3x3 patches, up to four of them."""

from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)

from tests.support.checkpoints import llava
from tests.support.checkpoints.options import CHAT_TEMPLATE, CheckpointOptions, text_config

respelt = llava.respelt
inputs = llava.inputs


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[LlavaNextForConditionalGeneration, LlavaNextProcessor]:
    """The model, not yet randomised, and its processor."""
    vision, class_tokens = llava.tower(chosen)
    strategy = "default" if class_tokens else "full"
    text = text_config(chosen.language, chosen, words)
    side = vision.image_size
    resolutions = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side], [3 * side, side]]
    config = LlavaNextConfig(
        **{
            "vision_config": vision,
            "text_config": text,
            "image_token_index": words.convert_tokens_to_ids("<image>"),
            "image_grid_pinpoints": resolutions,
            "vision_feature_select_strategy": strategy,
            "vision_feature_layer": -2 if class_tokens else -1,
            "tie_word_embeddings": text.tie_word_embeddings,
            **chosen.config,
        }
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=config.image_grid_pinpoints,
        **chosen.images,
    )
    processor = LlavaNextProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=class_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    return LlavaNextForConditionalGeneration(config), processor
