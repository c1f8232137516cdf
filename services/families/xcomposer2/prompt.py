"""XComposer2's prompts: a picture's rows in the place of `<ImageHere>`. Each part of the text is tokenized apart, and
begins with the token that begins a text, unless it is empty (`interleav_wrap_chat`)."""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.xcomposer2.sizes import Tiling
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

_MARK = "<ImageHere>"
_PLACEHOLDER = 0  # InternLM2's <unk>: every position takes an embedding row
_DEFAULT_BOS = 1


class XComposer2Rule(PromptRule):
    """Rows by the picture's size."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: None}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        self._tiling = Tiling.read(checkpoint)
        self.part_beginning = (int(checkpoint.config.get("bos_token_id") or _DEFAULT_BOS),)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, _MARK),)

    def span(self, item: ItemSize) -> MediaSpan:
        """As many placeholders as there are rows."""
        rows = self._tiling.rows(item.width, item.height)
        return MediaSpan(token_ids=(_PLACEHOLDER,) * rows, rows=rows)
