"""WeMM's image processor: every picture gets the same longest edge, small ones too (MindIE-LLM,
`image_processor_2k.py`)."""

from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

from services.families.wemm.sizes import Resizing

Array = np.ndarray[Any, np.dtype[Any]]


class WeMMImageProcessor(Idefics2ImageProcessorPil):  # type: ignore[misc]
    """Idefics2's but for the size. Pictures are not padded: the tower does that."""

    def resize(self, image: Array, size: SizeDict, resample: Any = None, **kwargs: Any) -> Array:
        """[channels, height, width]."""
        resizing = Resizing(size.shortest_edge, size.longest_edge, enlarges=True, patch=14)
        width, height = resizing.resized(image.shape[2], image.shape[1])
        resized: Array = PilBackend.resize(
            self, image, SizeDict(height=height, width=width), resample=resample, **kwargs
        )
        return resized
