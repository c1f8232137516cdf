"""Which tokens ERNIE's layers send to the experts of pictures."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_IMAGE = ("image_token_id", "image_start_token_id", "image_end_token_id")
_VIDEO = ("video_token_id", "video_start_token_id", "video_end_token_id")


def token_types(config: Any, ids: Tensor) -> Mapping[str, Tensor]:
    """See "layer_inputs" of `Family.overrides`. The ids tell it, as they do in the class's own processor; it differs
    from the class's `generate` where a model writes one of these tokens itself, which that takes for text."""
    kinds = [
        torch.isin(ids, ids.new_tensor([getattr(config, name) for name in names]))
        for names in (_IMAGE, _VIDEO)
    ]
    return {"moe_mm_token_type_ids": kinds[0].int() + 2 * kinds[1].int()}
