"""Bundles by the checkpoint's whole processor: all tensors of a picture, and the token ids that it writes for it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from services.families import registry
from services.preprocess.media.image_limits import ImageLimits, UnreadableImage
from services.preprocess.media.item_options import Options
from services.preprocess.worker.maker import NONE, Answer, Pixels
from shared.artifacts import bundle
from shared.artifacts.pixel_scaling import PixelScaling
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import (
    OFFSETS,
    SPAN_IDS,
    build_processor,
    picture_tensors,
    placeholder_ids,
    run_processor,
)
from shared.errors import InvalidRequest

_MOST_FIELD_VALUES = 64
# Width, height: each may take another way through the code.
_SAMPLES = ((64, 48), (48, 640), (900, 700))


class OtherSurroundings(ValueError):
    """A processor writes text around a picture that depends on its size."""


class ProcessorMaker:
    """An instance of the processor class that the checkpoint names, in this process. It takes images.

    `settings` hold, for the prompt rule: `marker`, the id of the token that the template writes for an image; `around`,
    the text that the processor puts before and behind it; `placeholders`, the ids that take embedding rows;
    `most_images` of a prompt, None for any number; `examples`, texts with one picture and, where that many may be,
    with two of different sizes, each with its ids and those of its pictures.
    """

    scaling: PixelScaling | None = None  # the processor itself does everything to the pixels

    def __init__(self, folder: Path, family: str = "") -> None:
        """Raises InvalidRequest where the processor cannot be made, or fails on a sample."""
        import transformers

        checkpoint = Checkpoint(folder, family)
        record = registry.find(checkpoint)
        self._takes_all = record.takes_all_rows
        self._processor = build_processor(checkpoint, record.processor_config(checkpoint))
        self._name = type(self._processor).__name__
        self._marker = self._find_marker()
        self._special = self._special_tokens()
        placeholders = placeholder_ids(checkpoint)
        self._around = ("", "")
        try:
            pictures = [PIL.Image.new("RGB", size) for size in _SAMPLES]
            self._around = self._cut(self._replaced(pictures[:1])[0])[::2]
            spans = [self.make(picture)[1]["ids"] for picture in pictures]
            most = None if self._takes_several(pictures) else 1
            examples = [self._example(text, found) for text, found in example_prompts(most)]
        except ImportError as error:
            raise InvalidRequest(
                "MISSING_PACKAGE", f"{self._name} cannot run here: {error}", field="model"
            ) from error
        except OtherSurroundings as error:
            raise self._unsupported(str(error)) from error
        except (UnreadableImage, *_FAILURES) as error:
            raise self._unsupported(f"it fails on a picture: {error!r}") from error
        if not set(placeholders) & set(spans[0]):
            raise self._unsupported(f"it writes none of the tokens {placeholders} for a picture")
        self.settings: dict[str, Any] = {
            "class": self._name,
            "transformers": transformers.__version__,
            "processor": _plain(self._processor.to_dict()),
            "marker": self._processor.tokenizer.convert_tokens_to_ids(self._marker),
            "around": self._around,
            "placeholders": placeholders,
            "most_images": most,
            "examples": examples,
        }

    def make(self, image: PIL.Image.Image, options: Options = NONE) -> tuple[Pixels, Answer]:
        """A bundle (`shared.artifacts.bundle`), and the `ids` and small tensors (`fields`) of the picture."""
        made = run_processor(self._processor, [image], self._marker, **options)
        before, text, after = self._cut(made[OFFSETS][0][0]["replacement"])
        if (before, after) != self._around:
            raise OtherSurroundings(
                f"it writes {before!r} and {after!r} around a picture of {image.width} x {image.height} pixels, and"
                f" {self._around[0]!r} and {self._around[1]!r} around others: such text is tokenized before pictures"
                " are seen"
            )
        tensors = picture_tensors(made)
        small = {name: found for name, found in tensors.items() if found.size <= _MOST_FIELD_VALUES}
        fields = {
            name: {
                "dtype": str(found.dtype),
                "shape": found.shape,
                "values": found.ravel().tolist(),
            }
            for name, found in small.items()
        }
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._takes_all:
            tensors[SPAN_IDS] = np.array(ids, np.int64)
        return bundle.pack(tensors), {"ids": ids, "fields": fields}

    def video_bytes(self, limits: ImageLimits) -> int:
        """See `Maker`. Video processors need torchvision."""
        return 0

    def make_video(
        self,
        pictures: Iterable[PIL.Image.Image],
        count: int,
        limits: ImageLimits,
        options: Options = NONE,
    ) -> tuple[Pixels, tuple[int, int]]:
        """Raises ValueError."""
        raise ValueError(f"{self._name} takes no videos here")

    def _find_marker(self) -> str:
        found = getattr(self._processor, "image_token", None)
        if not isinstance(found, str) or not found:
            raise self._unsupported("it has no token for an image")
        return found

    def _special_tokens(self) -> re.Pattern[str]:
        tokenizer = self._processor.tokenizer
        added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        found = {*tokenizer.all_special_tokens, *added, self._marker}
        return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))

    def _replaced(self, pictures: Sequence[PIL.Image.Image]) -> list[str]:
        """The text that stands for each of several pictures of one prompt."""
        text = " ".join([self._marker] * len(pictures))
        made = run_processor(self._processor, pictures, text)
        if OFFSETS not in made:
            raise ValueError("it does not say what it writes in the place of a picture")
        return [found["replacement"] for found in made[OFFSETS][0]]

    def _cut(self, text: str) -> tuple[str, str, str]:
        """What is before the first special token, from that to the last, and what is behind it.

        The tokenizer cuts texts at special tokens: what is between them is tokenized by itself, what is outside
        together with what stands around it.
        """
        found = list(self._special.finditer(text))
        first, last = found[0].start(), found[-1].end()
        return text[:first], text[first:last], text[last:]

    def _takes_several(self, pictures: Sequence[PIL.Image.Image]) -> bool:
        """Whether the tokens of a picture are the same beside others."""
        try:
            together = self._replaced(pictures)
        except _FAILURES:
            return False
        return together == [self._replaced([picture])[0] for picture in pictures]

    def inputs(self, text: str, pictures: Sequence[PIL.Image.Image]) -> Any:
        """All that the checkpoint's own processor makes of a prompt, as numpy arrays. `text` has a {} for each of the
        pictures."""
        written = text.format(*[self._marker] * len(pictures))
        made = run_processor(self._processor, pictures, written, add_special_tokens=True)
        return {"text": written, **{name: made[name] for name in made if name != OFFSETS}}

    def _example(self, text: str, pictures: Sequence[PIL.Image.Image]) -> dict[str, Any]:
        made = self.inputs(text, pictures)
        ids = np.asarray(made["input_ids"])[0].tolist()
        items = [dict(self.make(picture)[1]) for picture in pictures]
        return {"text": made["text"], "ids": ids, "items": items}

    def _unsupported(self, why: str) -> InvalidRequest:
        return InvalidRequest(
            "UNSUPPORTED_MODEL", f"{self._name} cannot be used: {why}", field="model"
        )


def example_prompts(most_images: int | None) -> list[tuple[str, list[PIL.Image.Image]]]:
    """Texts with a {} for each picture, and their pictures: noise, in which a wrong place is seen."""
    first, second = (
        PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (h, w, 3)).astype(np.uint8))
        for w, h in _SAMPLES[:2]
    )
    one: tuple[str, list[PIL.Image.Image]] = ("See\n{}\nand say: what is it?", [first])
    two = ("{} is one,\nthe other is {}, say: are they alike?", [first, second])
    return [one] if most_images == 1 else [one, two]


# Whatever the code of some processor raises on a picture.
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the tokenizer, whose ids tell all of it, and the chat template."""
    return {key: settings[key] for key in settings if key not in ("tokenizer", "chat_template")}
