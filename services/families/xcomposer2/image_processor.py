"""XComposer2-4KHD's image processor: as many tiles as the shape allows, white beside what does not fill them."""

from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from services.families.xcomposer2.sizes import TILE, inner_height, scale

Array = np.ndarray[Any, np.dtype[Any]]
_WHITE = 255


class TilesImageProcessor(CLIPImageProcessorPil):  # type: ignore[misc]
    """CLIP's but for the size. The picture stays in one piece: the tower cuts it."""

    crop_to_patches = True  # the size is no one's that a picture could be given before

    def __init__(self, most_tiles: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.most_tiles = most_tiles

    def resize(self, image: Array, size: SizeDict, resample: Any = None, **kwargs: Any) -> Array:
        """[channels, height, width], both edges whole tiles."""
        turned = image.shape[2] < image.shape[1]
        wide = np.ascontiguousarray(image.transpose(0, 2, 1)) if turned else image
        ratio = wide.shape[2] / wide.shape[1]
        columns = scale(ratio, self.most_tiles)
        inner = SizeDict(height=inner_height(ratio, columns), width=columns * TILE)
        resized = PilBackend.resize(self, wide, inner, resample=_bilinear(), **kwargs)
        missing = -resized.shape[1] % TILE
        above = missing // 2
        filled = np.pad(resized, ((0, 0), (above, missing - above), (0, 0)), constant_values=_WHITE)
        return filled.transpose(0, 2, 1) if turned else filled


def _bilinear() -> Any:
    from transformers.image_utils import PILImageResampling

    return PILImageResampling.BILINEAR
