"""What an item's pixels stand for: the float32 that transformers' image processor would have made."""

from typing import Any

import numpy as np

from shared.artifacts.store import ArtifactReader
from tessera.common.v1.media_pb2 import MediaItem, Modality

_MOMENTS = 2  # of a patch, in the families that have grids


async def pixel_values(item: MediaItem) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Opens an item's pixels, which must be bytes, and does the processor's last steps."""
    reader = ArtifactReader()
    try:
        raw = np.array(await reader.open(item.pixels))
    finally:
        await reader.close()
    assert raw.dtype == np.uint8
    said = item.scaling
    mean, deviation = (np.array(numbers, np.float32) for numbers in (said.mean, said.std))
    values = (raw.astype(np.float64) * said.factor).astype(np.float32)
    if not item.grid_t:  # [..., channels, height, width]
        return (values - mean[:, None, None]) / deviation[:, None, None]
    apart = values.reshape(len(raw), len(mean), 1, -1)
    apart = (apart - mean[:, None, None]) / deviation[:, None, None]
    if item.modality == Modality.MODALITY_IMAGE:
        apart = apart.repeat(_MOMENTS, axis=2)
    return apart.reshape(len(raw), -1)
