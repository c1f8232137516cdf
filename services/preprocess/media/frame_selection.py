"""Which frames of a video the model gets: evenly spaced, as in transformers' video processors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FrameSelection:
    """A checkpoint's frame rate and bounds, within the server's limit."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2  # frames that one step of the tower's grid shows

    def choose(self, total: int, seconds: float | None) -> list[int]:
        """Indices of the selected frames of `total`; `seconds` is their duration, None if unknown.

        All of them where that is not too many. Else as `Qwen2VLVideoProcessor.sample_frames` of
        transformers: `fps` for each second, their number a multiple, spread from the first on.
        """
        wanted = float(total) if seconds is None else seconds * self.fps
        wanted = min(max(wanted, self.min_frames), self.max_frames)
        if wanted >= total:
            return list(range(total))
        count = int(wanted) // self.multiple * self.multiple or max(1, int(wanted))
        return [index * total // count for index in range(count)]
