"""Llama 3.2 Vision's rows by its class: those of all tiles, as wide as the text."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_TAKES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


def features(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """See "features" of `Family.overrides`."""
    inner = model.model
    seen = inner.vision_model(**{name: tensors[name] for name in _TAKES}).last_hidden_state
    rows: Tensor = inner.multi_modal_projector(seen)
    return rows.reshape(-1, rows.shape[-1])
