"""What a model family says about media in its prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class MediaSpan:
    """The tokens that stand for one media item, known from its size alone.

    `embed_runs` are (start, length) pairs inside the span that take an embedding row; empty means
    all positions.
    """

    token_ids: tuple[int, ...]
    rows: int
    embed_runs: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, int, int] = (0, 0, 0)


class PromptRule(Protocol):
    """One family's rule. `marker` is the text of the one token that stands for an image before expansion."""

    @property
    def marker(self) -> str | None:
        """None when the model takes no images."""

    @property
    def marker_id(self) -> int:
        """The marker's token id; -1 when the model takes no images."""

    def span(self, width: int, height: int) -> MediaSpan:
        """The tokens of an image of this size in pixels."""


@dataclass(frozen=True)
class ImageProcessing:
    """What a family may know of the checkpoint's image processor: its settings and an output's shape."""

    settings: Mapping[str, Any]
    shape: tuple[int, ...]
