"""Which of a step's tokens are rows of media, and their embeddings."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from services.decoder.media.embeddings import Embeddings
from services.decoder.media.media_spans import MediaSpan, contiguous_runs
from services.decoder.worker.inputs.rows import Longs, Rows
from services.decoder.worker.slots.slots import SlotTable

# Rows [first, last) of a span's embedding.
ReadRows = Callable[[MediaSpan, int, int], Tensor]


def reader(embeddings: Embeddings, width: int) -> ReadRows:
    """Reads rows of this width."""

    def read(span: MediaSpan, first: int, last: int) -> Tensor:
        return embeddings.rows(span.digest, first, last, span.rows, width)

    return read


def tokens_of(runs: Sequence[tuple[int, int]]) -> Longs:
    """Those inside a run (first, count), ascending."""
    return np.concatenate([np.arange(first, first + count) for first, count in sorted(runs)])


def embedded(
    rows: Rows, first: Longs, slots: SlotTable, read: ReadRows
) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The embeddings [n, width] of what media the rows have, and where in the batch each is put: (first token, n).
    first: where each row begins."""
    embeds: list[Tensor] = []
    runs: list[tuple[int, int]] = []
    if not slots.media:
        return embeds, runs
    for row, slot in enumerate(rows.slot.tolist()):
        for span, low, high in spans_of(slots, slot, int(rows.start[row]), int(rows.end[row])):
            values = read(span, low, high)
            targets = span.positions[low:high] - rows.start[row] + first[row]
            taken = 0
            for start, count in contiguous_runs(targets):
                runs.append((start, count))
                embeds.append(values[taken : taken + count])
                taken += count
    return embeds, runs


def split_levels(
    embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]], levels: int, tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Of rows [n, (1 + levels) * H] the first H, and the others of all runs as [tokens, H] for each level, zero
    elsewhere."""
    width = embeds[0].shape[1] // (1 + levels)
    deeper = [embeds[0].new_zeros((tokens, width)) for _ in range(levels)]
    for rows, (first, count) in zip(embeds, runs, strict=True):
        for level, part in enumerate(deeper, 1):
            part[first : first + count] = rows[:, level * width : (level + 1) * width]
    return [rows[:, :width] for rows in embeds], deeper


def spans_of(slots: SlotTable, slot: int, start: int, end: int) -> list[tuple[MediaSpan, int, int]]:
    """The media of a slot with an embedding row in [start, end), and which rows those are."""
    found = []
    if start < slots.prompt_len[slot]:
        for span in slots.media.get(slot, ()):
            low, high = np.searchsorted(span.positions, (start, end)).tolist()
            if low < high:
                found.append((span, low, high))
    return found
