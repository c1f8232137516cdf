"""The first half of a comparison: prompts with pictures as preprocess makes them, and as the model's processor does.

A program of its own, without torch, as the image workers are: `python -m services.comparison.prompts FOLDER FAMILY
FILE NUMBER`. It writes the prompts to FILE, or says in an `AnswerFile` of that number why there are none.
"""

import sys
from pathlib import Path

# What needs torch fails here as it does in an image worker.
if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np

from services.comparison import rule_prompts
from services.comparison.answer import say_refusal
from services.comparison.prepared import Prepared, media_items, write
from services.comparison.prompt_builder import open_builder
from services.families import registry
from services.families.family import GENERIC_PROMPT, load_part
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from services.preprocess.worker.processor_maker import ProcessorMaker, example_prompts
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality, PixelFormat


def main(folder: str, family: str, file: str, number: str) -> None:
    """Writes the file or says the refusal."""
    checkpoint = Checkpoint(Path(folder), family)
    say_refusal(int(number), lambda: write(Path(file), prepare(checkpoint)))


def prepare(checkpoint: Checkpoint) -> list[Prepared]:
    """Prompts with one picture and, where the model takes several, with two of different sizes.

    Raises InvalidRequest for what preprocess refuses at its start, and for a family's own prompt rule that writes other
    tokens than the processor.
    """
    is_generic = registry.find(checkpoint).prompt == GENERIC_PROMPT
    return _by_processor(checkpoint) if is_generic else rule_prompts.prepare(checkpoint)


def _by_processor(checkpoint: Checkpoint) -> list[Prepared]:
    """Of the rule for all models that have none of their own."""
    maker = ProcessorMaker(checkpoint.folder, checkpoint.family)
    find = load_part(registry.find(checkpoint).prompt)
    rule: PromptRule = find(checkpoint, ImageProcessing(maker.settings))
    builder = open_builder(checkpoint, rule)
    found = []
    most = rule.limits[Modality.MODALITY_IMAGE]
    for example, (text, pictures) in zip(rule.examples, example_prompts(most), strict=False):
        inputs = maker.inputs(text, pictures)
        arrays = {name: np.asarray(inputs[name]) for name in inputs if name != "text"}
        bundles = [maker.make(picture)[0].astype(np.uint8) for picture in pictures]
        prompt = builder.write(example)
        items = media_items(prompt, pictures, PixelFormat.PIXEL_FORMAT_BUNDLE)
        found.append(Prepared(prompt.ids, items, bundles, arrays))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
