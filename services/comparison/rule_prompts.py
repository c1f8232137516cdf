"""Prompts with pictures of a family that has a prompt rule of its own, beside those of its class's processor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image

from services.comparison.prepared import Arrays, Prepared, media_items
from services.comparison.prompt_builder import open_builder
from services.families import registry
from services.families.family import ItemSize, load_part
from services.preprocess.media.processor_config import read_processor_config
from services.preprocess.prompt.builder import Prompt
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from services.preprocess.worker.pixel_maker import PixelMaker
from services.preprocess.worker.processor_maker import example_prompts
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import (
    build_processor,
    image_processor_class,
    image_processor_name,
)
from shared.checkpoint.refusal import unsupported
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality, PixelFormat

Pictures = Sequence[PIL.Image.Image]

_SAMPLE = (64, 48)  # width, height
_SHOWN = 5  # tokens of a message
# Whatever the code of some processor raises where files lack what it needs.
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ImportError)


def prepare(checkpoint: Checkpoint) -> list[Prepared]:
    """Prompts with one picture and, where several are taken, with two of different sizes.

    The class gets what its own processor makes of them. Of a processor that fails, or that writes another number of
    tokens for a picture than there are rows (old files do not say how many), it gets the pictures' tensors and the
    rule's tokens. Raises InvalidRequest where tokens differ otherwise.
    """
    config = read_processor_config(checkpoint.folder, checkpoint.family)
    maker = PixelMaker(image_processor_name(config), config, None)
    shape = maker.make(PIL.Image.new("RGB", _SAMPLE))[0].shape
    find = load_part(registry.find(checkpoint).prompt)
    rule: PromptRule = find(checkpoint, ImageProcessing(maker.settings, shape))
    builder = open_builder(checkpoint, rule)
    processor = _processor(checkpoint, config)
    found = []
    for text, pictures in example_prompts(rule.limits[Modality.MODALITY_IMAGE]):
        sizes = [ItemSize(*picture.size) for picture in pictures]
        prompt = builder.write_chat(text, sizes)
        plain = PixelFormat.PIXEL_FORMAT_PLAIN
        items = media_items(prompt, pictures, plain, maker.scaling)
        pixels = [maker.make(picture)[0] for picture in pictures]
        inputs = _inputs(checkpoint, processor, text, pictures, prompt)
        if inputs is None:
            inputs = {"input_ids": prompt.ids[None].astype(np.int64), **_tensors(config, pictures)}
        found.append(Prepared(prompt.ids, items, pixels, inputs))
    return found


def _processor(checkpoint: Checkpoint, config: dict[str, Any]) -> Any:
    """None for one that cannot be made."""
    try:
        return build_processor(checkpoint, config)
    except InvalidRequest:
        return None


def _inputs(
    checkpoint: Checkpoint, processor: Any, text: str, pictures: Pictures, prompt: Prompt
) -> Arrays | None:
    """All that the processor makes of a prompt; None where its tokens cannot be those of the model."""
    start = not any(
        prompt.offsets
    )  # the rule's pictures stand before the text, where nothing marks them
    marker = "" if start else str(getattr(processor, "image_token", ""))
    written = text.format(*[marker] * len(pictures))
    try:
        made = processor(images=list(pictures), text=[written], return_tensors="np")
        ids = np.asarray(made["input_ids"])[0].tolist()
    except _FAILURES:
        return None
    ours = prompt.ids.tolist()
    tokens = {token for span in prompt.spans for token in span.token_ids}
    if sum(i in tokens for i in ids) != sum(i in tokens for i in ours):
        return None
    if ids != ours:
        place = next((i for i, (x, y) in enumerate(zip(ids, ours, strict=False)) if x != y), 0)
        raise unsupported(
            checkpoint,
            f"its processor writes other tokens for a prompt with pictures: {ids[place:][:_SHOWN]} behind {place} that"
            f" are equal, where its prompt rule here has {ours[place:][:_SHOWN]}. --skip-model-check serves it without"
            " that comparison",
        )
    return {name: np.asarray(made[name]) for name in made}


def _tensors(config: dict[str, Any], pictures: Pictures) -> Arrays:
    """What the image processor alone makes."""
    images = image_processor_class(image_processor_name(config)).from_dict(config)
    given = list(pictures) if len(pictures) > 1 else pictures[0]
    made = images(images=given, return_tensors="np")
    return {name: np.asarray(made[name]) for name in made}
