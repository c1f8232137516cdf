"""BLIP-2: three rows of a Q-Former before an OPT."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers as hf
from PIL.Image import Image
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.checkpoints import generic
from tests.support.checkpoints.options import CheckpointOptions, text_config, text_sizes

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QFORMER = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "cross_attention_frequency": 1,
}
ROWS = 3


class Parts:
    """Image processor, tokenizer and the processor's settings, as the files of a released checkpoint."""

    def __init__(self, images: hf.BlipImageProcessorPil, words: PreTrainedTokenizerFast) -> None:
        self._images = images
        self._words = words

    def save_pretrained(self, folder: Path) -> None:
        """Writes all."""
        self._images.save_pretrained(folder)
        self._words.save_pretrained(folder)
        settings = {"processor_class": "Blip2Processor", "num_query_tokens": ROWS}
        (folder / "processor_config.json").write_text(json.dumps(settings))


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[PreTrainedModel, Parts]:
    """Without a chat template, as released; `language` is that of `text_config`, or "opt"."""
    words.chat_template = None
    first = words.bos_token
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, words.bos_token_id)]
    )
    if chosen.language == "llama":
        sizes = text_sizes(chosen, words)
        sizes["ffn_dim"] = sizes.pop("intermediate_size")
        sizes["word_embed_proj_dim"] = sizes["hidden_size"]
        text = hf.OPTConfig(**sizes)
    else:
        text = text_config(chosen.language, chosen, words)
    config = hf.Blip2Config(
        text_config=text,
        vision_config={**_VISION, **chosen.vision},
        qformer_config=_QFORMER,
        num_query_tokens=ROWS,
        **{"image_token_index": words.convert_tokens_to_ids("<image>"), **chosen.config},
    )
    images = hf.BlipImageProcessorPil(size={"height": 28, "width": 28}, **chosen.images)
    return hf.Blip2ForConditionalGeneration(config), Parts(images, words)


def inputs(folder: Path, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """What `generate` takes, from a rendered prompt."""
    processor = generic.processor(folder)
    made = processor(images=list(images) or None, text=text, return_tensors="pt")
    return {name: made[name] for name in made if name != "attention_mask"}
