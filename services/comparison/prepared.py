"""Prompts with pictures on their way from one half of a comparison to the other, as a file."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from services.preprocess.prompt.builder import Prompt
from shared.artifacts import pixel_scaling
from shared.artifacts.small_tensor import small_tensor
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality, PixelFormat, PixelScaling

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Prepared:
    """A prompt: its ids [tokens], its items with the artifact's content of each, and what the class takes, by name."""

    ids: npt.NDArray[np.int32]
    items: list[MediaItem]
    pixels: list[npt.NDArray[Any]]
    inputs: Arrays


def media_items(
    prompt: Prompt,
    pictures: Sequence[PIL.Image.Image],
    form: PixelFormat.ValueType,
    scaling: pixel_scaling.PixelScaling | None = None,
) -> list[MediaItem]:
    """As preprocess answers; digests are numbers."""
    scaled = None
    if scaling is not None:
        scaled = PixelScaling(factor=scaling.factor, mean=scaling.mean, std=scaling.deviation)
    made = zip(prompt.offsets, prompt.spans, pictures, strict=True)
    return [
        MediaItem(
            digest=bytes([number]) * 16,
            modality=Modality.MODALITY_IMAGE,
            offset=offset,
            length=len(span.token_ids),
            embed_runs=[EmbedRun(start=start, length=length) for start, length in span.embed_runs],
            rows=span.rows,
            grid_t=span.grid[0],
            grid_h=span.grid[1],
            grid_w=span.grid[2],
            width=picture.width,
            height=picture.height,
            scaling=scaled,
            fields={name: small_tensor(value) for name, value in span.fields.items()},
            format=form,
        )
        for number, (offset, span, picture) in enumerate(made, start=1)
    ]


def write(file: Path, prompts: list[Prepared]) -> None:
    """Writes the file."""
    arrays: Arrays = {}
    for number, prompt in enumerate(prompts):
        arrays[f"{number} ids"] = prompt.ids
        for place, item in enumerate(prompt.items):
            arrays[f"{number} item {place}"] = np.frombuffer(item.SerializeToString(), np.uint8)
            arrays[f"{number} pixels {place}"] = prompt.pixels[place]
        arrays |= {f"{number} input {name}": value for name, value in prompt.inputs.items()}
    with file.open("wb") as sink:
        np.savez(sink, **arrays)  # type: ignore[arg-type]


def read(file: Path) -> list[Prepared]:
    """The prompts that were written."""
    found: defaultdict[int, Prepared] = defaultdict(
        lambda: Prepared(np.empty(0, np.int32), [], [], {})
    )
    with np.load(file) as arrays:
        for key in arrays.files:
            number, kind, *name = key.split(" ")
            values, prompt = arrays[key], found[int(number)]
            match kind:
                case "ids":
                    found[int(number)] = Prepared(
                        values, prompt.items, prompt.pixels, prompt.inputs
                    )
                case "item":
                    prompt.items.append(MediaItem.FromString(values.tobytes()))
                case "pixels":
                    prompt.pixels.append(values)
                case _:
                    prompt.inputs[name[0]] = values
    return [found[number] for number in sorted(found)]
