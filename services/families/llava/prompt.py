"""LLaVA 1.5's prompts: one `<image>` for each row of the tower's output.

The patch size is taken from the tower, not from the processor: old processor files do not have it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.families.family import ItemSize
from services.families.llava.sizes import square_rows
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.llava import LlavaConfig
from tessera.common.v1.media_pb2 import Modality

_DEFAULT_IMAGE_TOKEN = 32000


class LlavaRule(PromptRule):
    """The number of rows is the same for every image, because the processor makes all of one size."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: None}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        self.image_token = _image_token(checkpoint.config)
        self.rows = _square_rows(checkpoint, processing)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, (self.image_token,)),)

    def span(self, item: ItemSize) -> MediaSpan:
        """As many placeholders as the tower gives rows, whatever the size."""
        return MediaSpan(token_ids=(self.image_token,) * self.rows, rows=self.rows)


def _image_token(config: Mapping[str, Any]) -> int:
    """The placeholder's id, under its new or its old name."""
    for key in ("image_token_id", "image_token_index"):
        if config.get(key) is not None:
            return int(config[key])
    return _DEFAULT_IMAGE_TOKEN


def _square_rows(checkpoint: Checkpoint, processing: ImageProcessing) -> int:
    """Rows of a square. Raises InvalidRequest if the processor's squares are not those of the tower."""
    config = LlavaConfig.read(checkpoint)
    side, made = config.tower.image_size, tuple(processing.shape[-2:])
    if made != (side, side):
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"the image processor makes {made} pixels where the tower takes {(side, side)}:"
            " crop_size or size in preprocessor_config.json is wrong",
        )
    return square_rows(config)
