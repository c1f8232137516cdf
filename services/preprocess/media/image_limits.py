"""Limits of images and videos, checked by their headers."""

from dataclasses import dataclass

from shared.prompts.length_text import LENGTH_EXCEEDED, length_text

# Progressive JPEGs of common encoders have about 10 scans, of four colours 18. Each is a pass over all of the picture.
_MOST_SCANS = 64
_MOST_SCANS_OF_LARGEST = 20
_MOST_FRAMES = 10_000


class UnreadableImage(Exception):
    """The file is not an image that can be used; `reason` is a stable word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class NeedsMoreMemory(UnreadableImage):
    """Decoding the file needs more memory than allowed."""

    def __init__(self, kind: str, limit: int) -> None:
        super().__init__(
            f"{kind.upper()}_TOO_LARGE",
            f"the {kind} needs more memory to decode than {limit} bytes (--image-memory-bytes)",
        )


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image, checked on its header before a pixel is decoded, and of a video."""

    max_pixels: int
    max_video_pixels: int = 1 << 62
    memory_bytes: int = 640 << 20  # that decoding one may take
    max_rows: int = 1 << 62  # more embeddings than any prompt can hold
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
                f"the image is {width}x{height}, over the limit of {self.max_pixels} pixels"
                " (--max-image-pixels)",
            )
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise UnreadableImage(
                "IMAGE_ASPECT_RATIO",
                f"the image is {width}x{height}; one side may be at most"
                f" {self.max_aspect_ratio:g} times the other",
            )

    def check_memory(self, width: int, height: int, bytes_per_pixel: int) -> None:
        """Raises UnreadableImage when decoding takes more than the memory for it."""
        most = self.memory_bytes // bytes_per_pixel
        if width * height > most:
            raise UnreadableImage(
                "IMAGE_TOO_LARGE",
                f"the image is {width}x{height}; of its format {most} pixels are taken, which need"
                f" {self.memory_bytes} bytes to decode (--image-memory-bytes)",
            )

    def check_scans(self, scans: int, width: int, height: int) -> None:
        """Raises UnreadableImage when a JPEG has more scans than any encoder writes, or so many for its size that
        decoding takes long.
        """
        most = min(_MOST_SCANS, _MOST_SCANS_OF_LARGEST * self.max_pixels // (width * height))
        if scans > most:
            raise UnreadableImage(
                "IMAGE_TOO_LARGE",
                f"the JPEG has {scans} scans, over the limit of {most} for {width}x{height}: save it"
                " anew, not progressive",
            )

    def check_animation(self, frames: int, width: int, height: int) -> None:
        """Raises UnreadableImage when an animation has too many frames, each of which is decoded."""
        if frames * width * height > self.max_video_pixels or frames > _MOST_FRAMES:
            raise UnreadableImage(
                "VIDEO_TOO_LARGE",
                f"the animation has {frames} frames of {width}x{height} or more; {_MOST_FRAMES} frames"
                f" of {self.max_video_pixels} pixels together are taken (--max-video-pixels)",
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
        """Raises UnreadableImage when a video has more embeddings than a prompt can hold."""
        if rows > self.max_rows:
            raise UnreadableImage(
                LENGTH_EXCEEDED,
                length_text(
                    self.max_rows,
                    f"the video resulted in {rows} tokens",
                    "send fewer or smaller frames",
                ),
            )
