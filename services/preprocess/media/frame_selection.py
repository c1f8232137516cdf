"""Which frames of a video the model is shown: evenly, as transformers' video processors choose."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """A checkpoint's wishes within the server's limit."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2  # frames that one step of the tower's grid shows

    def choose(self, total: int, seconds: float | None) -> list[int]:
        """Indices of the frames to show of `total` that last `seconds` together; None is not known.

        All of them where that is not too many. Else as `Qwen2VLVideoProcessor.sample_frames` of
        transformers: `fps` for each second, their number a multiple, spread from the first on.
        """
        wanted = float(total) if seconds is None else seconds * self.fps
        wanted = min(max(wanted, self.min_frames), self.max_frames)
        if wanted >= total:
            return list(range(total))
        count = int(wanted) // self.multiple * self.multiple or max(1, int(wanted))
        return [index * total // count for index in range(count)]
