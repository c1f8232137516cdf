"""Qwen-VL's pictures in MindIE-LLM's ids: a tensor of pixel values, [3, side, side] or with a one before it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.families.qwen_vl.sizes import MARKS, ROWS, VisualConfig
from shared.errors import InvalidRequest

Array = np.ndarray[Any, np.dtype[Any]]

_CHANNELS = 3


class QwenVLIds:
    """The token that begins a picture, two codes, and the tokens of the other rows; what ends it is the template's."""

    dtypes: Sequence[type[np.generic]] = (np.float32,)
    end: int | None = None

    def __init__(self, config: VisualConfig, row: int) -> None:
        self.begin = config.start_token
        self.fill = row
        self._shape = (_CHANNELS, config.image_size, config.image_size)

    def check(self, shapes: Sequence[tuple[int, ...]], tokens: int) -> None:
        """All pictures have one size."""
        if shapes[0] not in (self._shape, (1, *self._shape)):
            raise InvalidRequest(
                "IMAGE_UNUSABLE", f"pixel values of shape {shapes[0]}; {(1, *self._shape)} is taken"
            )
        if tokens != ROWS + MARKS:
            raise InvalidRequest(
                "IMAGE_UNUSABLE", f"a picture of {tokens} tokens; {ROWS + MARKS} stand for each"
            )

    def picture(self, tensors: Sequence[Array], tokens: int) -> Array:
        """[3, side, side]."""
        return tensors[0].reshape(self._shape)

    def tensors(self, pixels: Array) -> Sequence[Array]:
        """[1, 3, side, side]."""
        return (pixels[None],)
