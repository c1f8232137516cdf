"""WeMM's prompts: one picture, two separators and its rows between them in the place of `<image>`."""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.wemm.mindie import WeMMIds
from services.families.wemm.sizes import Resizing
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

_MARK = "<image>"
_PLACEHOLDER = 0  # InternLM2's <unk>: every position takes an embedding row


class WeMMRule(PromptRule):
    """Rows by the picture's size."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: 1}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        self._resizing = Resizing.of(checkpoint, processing.settings)
        self.mindie = WeMMIds(self._resizing)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, _MARK),)

    def span(self, item: ItemSize) -> MediaSpan:
        """As many placeholders as there are rows."""
        rows = item.tokens or self._resizing.rows(item.width, item.height)
        return MediaSpan(token_ids=(_PLACEHOLDER,) * rows, rows=rows)
