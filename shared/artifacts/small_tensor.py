"""Tensors of a few elements that travel inside messages (`MediaItem.fields`)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import SmallTensor


def small_tensor(values: npt.NDArray[Any]) -> SmallTensor:
    """The message of an array."""
    order = values.dtype.newbyteorder("<")
    data = np.ascontiguousarray(values, order).tobytes()
    return SmallTensor(dtype=str(values.dtype), shape=values.shape, data=data)


def array_of(message: SmallTensor) -> npt.NDArray[Any]:
    """The array of a message. Raises InvalidRequest if its parts contradict each other."""
    try:
        kind = np.dtype(message.dtype)
        found: npt.NDArray[Any] = np.frombuffer(message.data, kind.newbyteorder("<"))
        return found.astype(kind).reshape(tuple(message.shape))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            "INVALID_MEDIA", f"a tensor of {message.dtype} {list(message.shape)}: {error}"
        ) from error
