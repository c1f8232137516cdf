"""BLIP-2's prompts: the rows of the one picture stand before the text, even before the token that begins it."""

from collections.abc import Mapping, Sequence

from services.families.blip2.sizes import PictureConfig
from services.families.family import ItemSize
from services.preprocess.prompt.prompt_rule import (
    ImageProcessing,
    MediaSpan,
    Mode,
    Place,
    PromptRule,
    Update,
)
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality


class Blip2Rule(PromptRule):
    """Every picture has as many rows."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: 1}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        self._config = PictureConfig.read(checkpoint)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, Place.START, Mode.INSERT),)

    def span(self, item: ItemSize) -> MediaSpan:
        """The same for every picture."""
        rows = self._config.rows
        return MediaSpan(token_ids=(self._config.token,) * rows, rows=rows)
