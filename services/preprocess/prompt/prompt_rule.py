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
    frames_per_step: int = 0  # of a video: how many frames one step of the grid shows


class ImagesOnly:
    """The part of a rule that families without videos share."""

    video_marker_id = -1

    def video_span(self, frames: int, width: int, height: int) -> MediaSpan:
        """Never asked: without a marker no video is taken."""
        raise AssertionError("this family has no video spans")


class PromptRule(Protocol):
    """One family's rule. `marker` is the text of the one token that stands for an image before expansion."""

    @property
    def marker(self) -> str | None:
        """None when the model takes no images."""

    @property
    def marker_id(self) -> int:
        """The marker's token id; -1 when the model takes no images."""

    @property
    def video_marker_id(self) -> int:
        """The id of the token that stands for a video before expansion; -1 when the model takes none."""

    def span(self, width: int, height: int) -> MediaSpan:
        """The tokens of an image of this size in pixels."""

    def video_span(self, frames: int, width: int, height: int) -> MediaSpan:
        """The tokens of a video of so many frames of this size in pixels."""


@dataclass(frozen=True)
class ImageProcessing:
    """What a family may know of the checkpoint's image processor: its settings and an output's shape."""

    settings: Mapping[str, Any]
    shape: tuple[int, ...]
