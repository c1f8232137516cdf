"""Ovis2's rows: of the tiles, and of the indicator tokens that stand around and between them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shared.checkpoint.processor import SPAN_IDS


def features(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """See "features" of `Family.overrides`. The class replaces the embeddings of its indicator tokens in a prompt with
    pictures, as it does those of a picture's own."""
    made, ids = model.get_image_features(tensors["pixel_values"]), tensors[SPAN_IDS]
    rows = made.pooler_output.flatten(0, 1)
    found: Tensor = rows.new_empty((len(ids), rows.shape[1]))
    found[ids == model.config.image_token_id] = rows
    indicators = model.config.visual_indicator_token_ids
    for token, row in zip(indicators, made.visual_indicator_features, strict=True):
        found[ids == token] = row
    return found
