"""The first half of a comparison: prompts with pictures as preprocess makes them, and as the model's processor does.

A program of its own, without torch, as the image workers are: `python -m services.comparison.prompts FOLDER FAMILY
FILE`. It writes the prompts to FILE, or prints why there are none, as JSON.
"""

import sys
from pathlib import Path

# What needs torch fails here as it does in an image worker.
if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np

from services.comparison.answer import say_refusal
from services.comparison.prepared import Prepared, write
from services.families import registry
from services.families.family import load_part
from services.preprocess.prompt.builder import Prompt, PromptBuilder
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from services.preprocess.prompt.tokenizer import PromptTokenizer
from services.preprocess.worker.processor_maker import (
    ProcessorMaker,
    example_prompts,
)
from shared.artifacts.small_tensor import small_tensor
from shared.checkpoint.folder import Checkpoint
from shared.text.template_processes import TemplateProcesses
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality

_LONGEST = 1 << 20  # tokens; the model's own length is no matter here


def main(folder: str, family: str, file: str) -> None:
    """Writes the file or says the refusal."""
    say_refusal(lambda: write(Path(file), prepare(Checkpoint(Path(folder), family))))


def prepare(checkpoint: Checkpoint) -> list[Prepared]:
    """Prompts with one picture and, where the model takes several, with two of different sizes.

    Raises InvalidRequest for what preprocess refuses at its start.
    """
    family = registry.find(checkpoint)
    maker = ProcessorMaker(checkpoint.folder, checkpoint.family)
    rule: PromptRule = load_part(family.prompt)(checkpoint, ImageProcessing(maker.settings))
    tokenizer = PromptTokenizer(checkpoint.folder)
    builder = PromptBuilder(
        tokenizer,
        None,
        rule,
        TemplateProcesses(),  # none is started: these prompts have no template
        vocab_size=max(tokenizer.vocab_size, registry.text_sizes(checkpoint).vocab_size),
        max_model_len=_LONGEST,
        processor_adds_special_tokens=True,
        trust_request_template=False,
    )
    found = []
    most = rule.limits[Modality.MODALITY_IMAGE]
    for example, (text, pictures) in zip(rule.examples, example_prompts(most), strict=False):
        inputs = maker.inputs(text, pictures)
        arrays = {name: np.asarray(inputs[name]) for name in inputs if name != "text"}
        bundles = [maker.make(picture)[0].astype(np.uint8) for picture in pictures]
        prompt = builder.write(example)
        found.append(Prepared(prompt.ids, _items(prompt), bundles, arrays))
    return found


def _items(prompt: Prompt) -> list[MediaItem]:
    return [
        MediaItem(
            digest=bytes([number]) * 16,
            modality=Modality.MODALITY_IMAGE,
            offset=offset,
            length=len(span.token_ids),
            embed_runs=[EmbedRun(start=start, length=length) for start, length in span.embed_runs],
            rows=span.rows,
            fields={name: small_tensor(value) for name, value in span.fields.items()},
        )
        for number, (offset, span) in enumerate(
            zip(prompt.offsets, prompt.spans, strict=True), start=1
        )
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
