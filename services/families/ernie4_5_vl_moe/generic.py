"""Which tokens of a prompt ERNIE's layers send to the experts of pictures."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from services.decoder.models.generic.rope_index import Ids

_IMAGE = ("image_token_id", "image_start_token_id", "image_end_token_id")
_VIDEO = ("video_token_id", "video_start_token_id", "video_end_token_id")


def prompt_marks(config: Any, ids: Ids) -> Mapping[str, Ids]:
    """See "prompt_marks" of `Family.overrides`. The ids tell it, as they do in the class's own processor: those of
    pictures, and of what begins and ends them."""
    image, video = (
        np.isin(ids, [getattr(config, name) for name in names]) for names in (_IMAGE, _VIDEO)
    )
    return {"moe_mm_token_type_ids": image + 2 * video.astype(np.int64)}
