"""Prompts with pictures on their way from one half of a comparison to the other, as a file."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.common.v1.media_pb2 import MediaItem

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Prepared:
    """A prompt: its ids [tokens], its items with the bundle (uint8 [n]) of each, and what the class takes, by name."""

    ids: npt.NDArray[np.int32]
    items: list[MediaItem]
    bundles: list[npt.NDArray[np.uint8]]
    inputs: Arrays


def write(file: Path, prompts: list[Prepared]) -> None:
    """Writes the file."""
    arrays: Arrays = {}
    for number, prompt in enumerate(prompts):
        arrays[f"{number} ids"] = prompt.ids
        for place, item in enumerate(prompt.items):
            arrays[f"{number} item {place}"] = np.frombuffer(item.SerializeToString(), np.uint8)
            arrays[f"{number} bundle {place}"] = prompt.bundles[place]
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
                        values, prompt.items, prompt.bundles, prompt.inputs
                    )
                case "item":
                    prompt.items.append(MediaItem.FromString(values.tobytes()))
                case "bundle":
                    prompt.bundles.append(values)
                case _:
                    prompt.inputs[name[0]] = values
    return [found[number] for number in sorted(found)]
