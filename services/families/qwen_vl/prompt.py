"""Qwen-VL's prompts: the token that begins a picture, and one more token for each row of the resampler."""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.qwen_vl.mindie import QwenVLIds
from services.families.qwen_vl.sizes import ROWS, VisualConfig
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality


class QwenVLRule(PromptRule):
    """Every picture has as many rows. The token that ends a picture is the template's."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: None}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        config = VisualConfig.read(checkpoint)
        self._start, self._row = config.start_token, config.start_token + 2
        self.mindie = QwenVLIds(config, self._row)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, (self._start,)),)

    def span(self, item: ItemSize) -> MediaSpan:
        """The beginning and the rows, whatever the picture's size."""
        return MediaSpan(
            token_ids=(self._start, *[self._row] * ROWS),
            rows=ROWS,
            embed_runs=((1, ROWS),),
        )
