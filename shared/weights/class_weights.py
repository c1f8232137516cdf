"""A transformers class with the weights of a checkpoint, quantized or not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import load_without
from shared.errors import InvalidRequest
from shared.weights.number_weights import NumberWeights


def load_class(
    checkpoint: Checkpoint,
    kind: type[Any],
    config: Any,
    left_out: Sequence[str],
    dtype: torch.dtype,
    prepare: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> Any:
    """`load_without`, where layers that are stored as codes are the numbers that these stand for, one by one. Raises
    InvalidRequest as that does, and with the tensor's name for codes that make no numbers."""
    numbers = NumberWeights.of(checkpoint)
    if numbers is None:
        return load_without(checkpoint, kind, config, left_out, dtype, prepare, **options)
    tensors = numbers.state_dict()
    try:
        loaded = load_without(
            checkpoint, kind, config, left_out, dtype, prepare, tensors=tensors, **options
        )
    except InvalidRequest:
        if numbers.error is not None:  # which transformers words as its own
            raise numbers.error from None
        raise
    numbers.finish()
    return loaded
