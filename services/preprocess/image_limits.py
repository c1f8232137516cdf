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
    """What an image may be, by its header, before a pixel of it is decoded."""

    max_pixels: int
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
