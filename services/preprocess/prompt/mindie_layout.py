"""Where the codes of a picture's tensors stand among token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shared.artifacts.mindie_shm import Array, is_code
from shared.errors import InvalidRequest

Ids = np.ndarray[Any, np.dtype[np.int64]]

# Stands for a picture in `CodedPrompt.ids`.
PLACE = -1


class MindieLayout(Protocol):
    """How a model's port writes a picture: `begin`, for each tensor the code of its block's name and of its shape, as
    many `fill` as the picture's rows ask for, and `end`, where that is not the text's own token.
    """

    begin: int
    fill: int
    end: int | None
    dtypes: Sequence[type[np.generic]]  # of the tensors

    def check(self, shapes: Sequence[tuple[int, ...]], tokens: int) -> None:
        """Raises InvalidRequest if tensors of these shapes are no picture of so many tokens. Nothing is read yet."""

    def picture(self, tensors: Sequence[Array], tokens: int) -> Array:
        """float32 [channels, height, width] of the tensors. Raises InvalidRequest if they are no picture of so many
        tokens."""

    def tensors(self, pixels: Array) -> Sequence[Array]:
        """What is written for pixel values, float32 [channels, height, width]."""


@dataclass(frozen=True)
class CodedPicture:
    """A picture in a prompt: the codes of its tensors, how many tokens it takes, and what the client calls it."""

    codes: tuple[int, ...]
    tokens: int
    field: str


@dataclass(frozen=True)
class CodedPrompt:
    """A prompt's ids with one PLACE for each picture."""

    ids: Ids
    pictures: tuple[CodedPicture, ...]


def read_ids(ids: Ids, layout: MindieLayout, field: str) -> CodedPrompt:
    """Finds the pictures. Raises InvalidRequest, naming the place, for codes that do not stand as the layout says."""
    pieces: list[Ids] = []
    pictures: list[CodedPicture] = []
    count, start = 2 * len(layout.dtypes), 0
    for first in np.flatnonzero((ids[:-1] == layout.begin) & is_code(ids[1:])).tolist():
        name = f"{field}[{first}]"
        codes = ids[first + 1 : first + 1 + count]
        if first < start or len(codes) < count or not is_code(codes).all():
            raise _bad(name, f"{count} codes are expected behind the token that begins a picture")
        stop = first + 1 + count
        others = np.flatnonzero(ids[stop:] != layout.fill)
        stop = stop + int(others[0]) if len(others) else len(ids)
        if layout.end is not None:
            if stop == len(ids) or ids[stop] != layout.end:
                raise _bad(name, f"the picture does not end with {layout.end}")
            stop += 1
        pieces += [ids[start:first], np.array([PLACE], np.int64)]
        pictures.append(CodedPicture(tuple(codes.tolist()), stop - first, name))
        start = stop
    rest = np.concatenate([*pieces, ids[start:]])
    if is_code(rest).any():
        at = int(np.flatnonzero(is_code(ids))[0])
        raise _bad(f"{field}[{at}]", f"a code stands without {layout.begin} before it")
    return CodedPrompt(rest, tuple(pictures))


def write_ids(tokens: int, codes: Sequence[int], layout: MindieLayout) -> Ids:
    """The ids of a picture. Raises InvalidRequest if it takes too few tokens for its codes."""
    ids = np.full(tokens, layout.fill, np.int64)
    ids[0] = layout.begin
    room = tokens - 1 - (layout.end is not None)
    if len(codes) > room:
        raise InvalidRequest(
            "IMAGE_TOO_SMALL",
            f"a picture of {tokens} tokens has no room for the {len(codes)} ids of its tensors",
        )
    ids[1 : 1 + len(codes)] = codes
    if layout.end is not None:
        ids[-1] = layout.end
    return ids


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest("BAD_SHARED_MEMORY_ID", f"{field}: {what}", field=field)
