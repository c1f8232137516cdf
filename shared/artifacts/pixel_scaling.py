"""Pixels as whole numbers, and what a tower's processor makes of them: the same float32, bit for bit.

An image processor of transformers ends with two steps that look at one value at a time: it rescales
in float64, rounds to float32, then takes the mean away and divides by the deviation in float32.
What comes before is whole numbers from 0 to 255, so those can travel, a byte each, and the steps be
done where the values are needed, by a table of 256 entries for each channel.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PixelScaling:
    """`factor` of rescaling; `mean` and `deviation` of each channel, in float32's values."""

    factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of(cls, settings: dict[str, Any], channels: int) -> Self:
        """What an image processor's settings, after defaults, ask for."""
        factor = float(settings["rescale_factor"]) if settings.get("do_rescale", True) else 1.0
        mean: Any = 0.0
        deviation: Any = 1.0
        if settings.get("do_normalize", True):
            mean, deviation = settings["image_mean"], settings["image_std"]
        return cls(factor, _each(mean, channels), _each(deviation, channels))

    def table(self) -> npt.NDArray[np.float32]:
        """float32 [channels, 256]: what becomes of each value."""
        values = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        mean = np.array(self.mean, np.float32)[:, None]
        deviation = np.array(self.deviation, np.float32)[:, None]
        return (values - mean) / deviation


def _each(value: Any, channels: int) -> tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value] * channels
    if len(values) != channels:
        raise ValueError(f"{len(values)} numbers for {channels} channels")
    return tuple(float(np.float32(number)) for number in values)
