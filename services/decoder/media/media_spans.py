"""Where the embedding rows of a sequence's media go."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidRequest, Precondition
from shared.prompts.modality import modality_of
from tessera.common.v1.media_pb2 import MediaItem

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class MediaSpan:
    """One media item: its artifact's row i is the embedding of the token at `positions[i]`, if tokens take any."""

    digest: bytes
    positions: Positions  # ascending
    end: int  # index after the last token of the span
    start: int
    rows: int  # of its artifact


def read_spans(
    media: Sequence[MediaItem], prompt_len: int, attended: bool = False
) -> tuple[MediaSpan, ...]:
    """attended: layers attend to the rows, and no token takes any. Raises InvalidRequest for spans outside the prompt
    or of an unknown modality, and Precondition for a broken promise."""
    return tuple(_read_span(item, prompt_len, attended) for item in media)


def embed_positions(spans: Sequence[MediaSpan]) -> Positions:
    """All positions that take an embedding row."""
    if not spans:
        return np.empty(0, np.int64)
    return np.concatenate([span.positions for span in spans])


def contiguous_runs(targets: Positions) -> list[tuple[int, int]]:
    """Ascending numbers as runs (first, count)."""
    breaks = np.flatnonzero(np.diff(targets) != 1) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [len(targets)]])
    return [(int(targets[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)]


def _read_span(item: MediaItem, prompt_len: int, attended: bool) -> MediaSpan:
    modality_of(item)
    if item.offset < 0 or item.length < 1 or item.offset + item.length > prompt_len:
        raise InvalidRequest(
            "INVALID_MEDIA",
            f"media span [{item.offset}, {item.offset + item.length}) is not inside the prompt of"
            f" {prompt_len} tokens",
            field="media",
        )
    start, end = item.offset, item.offset + item.length
    if attended:
        if item.rows < 1:
            raise Precondition("MEDIA_MISMATCH", f"an item has {item.rows} rows to attend to")
        return MediaSpan(bytes(item.digest), np.empty(0, np.int64), end, start, item.rows)
    runs = [(run.start, run.length) for run in item.embed_runs] or [(0, item.length)]
    last = 0
    for first, length in runs:
        if first < last or length < 1 or first + length > item.length:
            raise InvalidRequest(
                "INVALID_MEDIA",
                "embed_runs do not ascend inside their media span",
                field="media",
            )
        last = first + length
    positions = np.concatenate(
        [np.arange(first, first + length, dtype=np.int64) for first, length in runs]
    )
    if item.rows != len(positions):
        raise Precondition(
            "MEDIA_MISMATCH",
            f"the prompt has {len(positions)} places for the {item.rows} embedding rows of an item",
        )
    return MediaSpan(bytes(item.digest), positions + start, end, start, item.rows)
