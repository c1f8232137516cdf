"""Several tensors as one artifact: a safetensors serialization, as bytes (uint8 [n])."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Bundle = npt.NDArray[np.uint8]
Tensors = Mapping[str, npt.NDArray[Any]]


def pack(tensors: Tensors) -> Bundle:
    """The tensors by name, in the order of their names."""
    from safetensors.numpy import save

    return np.frombuffer(
        save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}), np.uint8
    )


def unpack(bundle: npt.NDArray[Any]) -> Tensors:
    """What was packed. Raises ValueError for bytes that `pack` did not write."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        found: Tensors = load(bundle.tobytes())
    except SafetensorError as error:
        raise ValueError(f"the bundle cannot be read: {error}") from error
    return found
