"""InternVL's prompts: a mark, the rows of a picture's tiles, a mark."""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.internvl_chat.sizes import Tiling
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.tokenizer_file import read_tokenizer
from tessera.common.v1.media_pb2 import Modality

_TOKENS = ("<img>", "<IMG_CONTEXT>", "</img>")


class InternVLRule(PromptRule):
    """Rows by the picture's size. The tokens' ids are the tokenizer's."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: None}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        self._tiling = Tiling.read(checkpoint)
        added = read_tokenizer(checkpoint.folder / "tokenizer.json").content["added_tokens"]
        ids = {token["content"]: int(token["id"]) for token in added}
        if missing := [token for token in _TOKENS if token not in ids]:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{checkpoint.folder}: the tokenizer lacks {', '.join(missing)}",
                field="model",
            )
        self._start, self._row, self._end = (ids[token] for token in _TOKENS)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, (self._start,)),)

    def span(self, item: ItemSize) -> MediaSpan:
        """The rows of all tiles between their marks."""
        rows = self._tiling.tiles(item.width, item.height) * self._tiling.rows
        return MediaSpan(
            token_ids=(self._start, *[self._row] * rows, self._end),
            rows=rows,
            embed_runs=((1, rows),),
        )
