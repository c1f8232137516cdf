"""Rotary positions of three axes by the published rule, one token at a time.

The rule is that of `get_rope_index` in transformers 4.57 and of vLLM: what follows an item begins
behind the largest position that the item has on any axis. transformers 5.23 begins at the item's
longer side, which is the same until a video's time is larger than that. Seconds keep their
fractions, as in 5.23 and vLLM; 4.57 cuts them off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.common.v1.media_pb2 import MediaItem, Modality


@dataclass(frozen=True)
class Grid:
    """An item's sizes in placeholder tokens, and the positions between two steps of its time."""

    steps: int
    rows: int
    columns: int
    pace: float = 1.0

    @property
    def outruns(self) -> bool:
        """Whether its last time is behind its sides, where versions of transformers differ."""
        return self.time(self.steps - 1) >= max(self.rows, self.columns)

    def time(self, step: int) -> int:
        """In float32, cut off."""
        return int(np.float32(step) * np.float32(self.pace))


def parts_of(
    length: int, media: Sequence[MediaItem], tokens_per_second: float | None = None
) -> list[int | Grid]:
    """A prompt of `length` tokens as `published_positions` takes it; two patches a side merged."""
    parts: list[int | Grid] = []
    done = 0
    for item in media:
        pace = 1.0
        if tokens_per_second and item.modality == Modality.MODALITY_VIDEO:
            pace = tokens_per_second * item.seconds_per_grid
        grid = Grid(item.grid_t, item.grid_h // 2, item.grid_w // 2, pace)
        parts += [item.offset - done, grid]
        done = item.offset + item.length
    return [*parts, length - done]


def published_positions(parts: Sequence[int | Grid]) -> list[tuple[int, int, int]]:
    """Time, row and column of each token of a prompt; a number stands for so many tokens of text."""
    found: list[tuple[int, int, int]] = []
    for part in parts:
        first = 1 + max((max(token) for token in found), default=-1)
        if isinstance(part, int):
            found += [(first + i,) * 3 for i in range(part)]
            continue
        found += [
            (first + part.time(step), first + row, first + column)
            for step in range(part.steps)
            for row in range(part.rows)
            for column in range(part.columns)
        ]
    return found
