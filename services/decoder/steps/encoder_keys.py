"""Keys and values of what an encoder made of media, for layers that attend to it: what each token of a step sees of
them, and which are written first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta, PagedKV

Longs = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Stretch:
    """Tokens of a sequence from index `start` on, up to the next stretch: they see rows [first, last) of its media, in
    the order in which these are kept."""

    start: int
    first: int
    last: int
    mark: int = 0  # the model's own, `AttendingTokens.marks`


@dataclass(frozen=True)
class MediaView:
    """What the tokens of a sequence see of the rows of its media.

    runs: (item, first row, rows) in the order in which the rows are kept, each row of each item once. Sequences with
    the same media share what is kept, so that the order depends on the media alone. stretches: ascending, the first one
    from token 0 on.
    """

    runs: Sequence[tuple[int, int, int]]
    stretches: Sequence[Stretch]

    def between(self, start: int, end: int) -> list[tuple[Stretch, int]]:
        """The stretches that have tokens in [start, end), and how many."""
        ends = [*(after.start for after in self.stretches[1:]), end]
        counted = (
            (stretch, min(end, after) - max(start, stretch.start))
            for stretch, after in zip(self.stretches, ends, strict=True)
        )
        return [(stretch, count) for stretch, count in counted if count > 0]


@dataclass(frozen=True)
class NewRows:
    """Rows of media whose keys and values are to be written."""

    values: Tensor  # [n, H], as the encoder made them
    meta: AttnMeta  # whose `slots` say where


@dataclass(frozen=True)
class SeenRows:
    """Tokens as rows of one query each, by what they see."""

    index: Tensor | None  # int64 [n]: which of the tokens that attend; None is all
    meta: AttnMeta
    window: (
        int | None
    )  # how many keys each sees of those that `meta` says, the last ones; None is all


@dataclass(frozen=True)
class AttendingTokens:
    """The tokens of a step that attend to media, those of sequences that have some."""

    caches: Sequence[PagedKV]  # one for each layer that is `EncoderKeys`
    new: Sequence[NewRows]  # written by each of these layers before anything is read
    tokens: Tensor  # int64 [n], ascending, in the batch
    marks: Tensor  # int64 [n], `Stretch.mark` of each
    seen: Sequence[SeenRows]
