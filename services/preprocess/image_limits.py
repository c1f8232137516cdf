"""Which images are taken, by their header alone."""

from dataclasses import dataclass


class UnreadableImage(Exception):
    """The file is not an image that can be used; `reason` is a stable word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class ImageLimits:
    """What an image may be, by its header, before a pixel of it is decoded; and what a video may be."""

    max_pixels: int
    max_video_pixels: int = 1 << 62
    max_rows: int = 1 << 62  # more embeddings than any prompt has room for
    min_side: int = 4
    max_aspect_ratio: float = 200.0

    def check(self, width: int, height: int) -> None:
        """Raises UnreadableImage when a picture of this size is not taken."""
        if min(width, height) < self.min_side:
            raise UnreadableImage(
                "IMAGE_TOO_SMALL",
                f"the image is {width}x{height}; both sides need at least {self.min_side} pixels",
            )
        if width * height > self.max_pixels:
            raise UnreadableImage(
                "IMAGE_TOO_LARGE",
                f"the image is {width}x{height}, over the limit of {self.max_pixels} pixels",
            )
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise UnreadableImage(
                "IMAGE_ASPECT_RATIO",
                f"the image is {width}x{height}; one side may be at most"
                f" {self.max_aspect_ratio:g} times the other",
            )

    def check_frames(self, count: int, width: int, height: int) -> None:
        """Raises UnreadableImage when so many frames of this size are not taken."""
        if count * width * height > self.max_video_pixels:
            raise UnreadableImage(
                "VIDEO_TOO_LARGE",
                f"the video shows {count} frames of {width}x{height}, over the limit of"
                f" {self.max_video_pixels} pixels (--max-video-pixels)",
            )

    def check_rows(self, rows: int) -> None:
        """Raises UnreadableImage when no prompt has room for so many embeddings of a video."""
        if rows > self.max_rows:
            raise UnreadableImage(
                "CONTEXT_LENGTH_EXCEEDED",
                f"This model's maximum context length is {self.max_rows} tokens. However, the video"
                f" resulted in {rows} tokens: send fewer or smaller frames",
            )
