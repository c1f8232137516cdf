"""Molmo2's rows: those of its class, and zeros for what stands between and around them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from services.vision_encoder.generic import image_features
from shared.checkpoint.processor import SPAN_IDS


def features(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """See "features" of `Family.overrides`. Rows are added to the embeddings of a picture's tokens, so that zeros leave
    its marks and separators as they are."""
    rows, ids = image_features(model, tensors), tensors[SPAN_IDS]
    found = rows.new_zeros((len(ids), rows.shape[1]))
    found[ids == model.config.image_patch_id] = rows
    return found
