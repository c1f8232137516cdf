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
    """One media item: its artifact's row i is the embedding of the token at `positions[i]`."""

    digest: bytes
    positions: Positions  # ascending
    end: int  # index after the last token of the span


def read_spans(media: Sequence[MediaItem], prompt_len: int) -> tuple[MediaSpan, ...]:
    """Raises InvalidRequest for spans outside the prompt or of an unknown modality, and Precondition for a broken
    promise."""
    return tuple(_read_span(item, prompt_len) for item in media)


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


def _read_span(item: MediaItem, prompt_len: int) -> MediaSpan:
    modality_of(item)
    if item.offset < 0 or item.length < 1 or item.offset + item.length > prompt_len:
        raise InvalidRequest(
            "INVALID_MEDIA",
            f"media span [{item.offset}, {item.offset + item.length}) is not inside the prompt of"
            f" {prompt_len} tokens",
            field="media",
        )
    runs = [(run.start, run.length) for run in item.embed_runs] or [(0, item.length)]
    end = 0
    for start, length in runs:
        if start < end or length < 1 or start + length > item.length:
            raise InvalidRequest(
                "INVALID_MEDIA",
                "embed_runs do not ascend inside their media span",
                field="media",
            )
        end = start + length
    positions = np.concatenate(
        [np.arange(start, start + length, dtype=np.int64) for start, length in runs]
    )
    if item.rows != len(positions):
        raise Precondition(
            "MEDIA_MISMATCH",
            f"the prompt has {len(positions)} places for the {item.rows} embedding rows of an item",
        )
    return MediaSpan(bytes(item.digest), positions + item.offset, item.offset + item.length)
