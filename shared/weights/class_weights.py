"""A transformers class with the weights of a checkpoint, quantized or not, or of a GGUF file."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import load_without
from shared.errors import InvalidRequest
from shared.weights.asked_tensors import Asked, Reads
from shared.weights.gguf_numbers import gguf_state_dict
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
    numbers, reads = NumberWeights.of(checkpoint), Reads()
    tensors: dict[str, Asked] | None = None
    if checkpoint.is_gguf:
        tensors = gguf_state_dict(checkpoint, dtype, reads)
    elif numbers is not None:
        tensors = numbers.state_dict(reads)
    try:
        loaded = load_without(
            checkpoint, kind, config, left_out, dtype, prepare, tensors=tensors, **options
        )
    except InvalidRequest:
        if reads.error is not None:  # which transformers words as its own
            raise reads.error from None
        raise
    if numbers is not None:
        numbers.finish()
    return loaded
