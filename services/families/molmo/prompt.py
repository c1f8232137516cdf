"""Molmo's prompts: the cells of the whole picture and those of its crops, line by line between marks."""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.molmo.sizes import Cropping
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.tokenizer_file import read_tokenizer
from tessera.common.v1.media_pb2 import Modality

_TOKENS = ("<im_start>", "<im_patch>", "<im_col>", "<im_end>")


class MolmoRule(PromptRule):
    """Cells by the picture's size. The tokens' ids are the tokenizer's."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: None}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        self._cropping = Cropping.read(checkpoint)
        added = read_tokenizer(checkpoint.folder / "tokenizer.json").content["added_tokens"]
        ids = {token["content"]: int(token["id"]) for token in added}
        if missing := [token for token in _TOKENS if token not in ids]:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{checkpoint.folder}: the tokenizer lacks {', '.join(missing)}",
                field="model",
            )
        self._start, self._patch, self._column, self._end = (ids[token] for token in _TOKENS)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, (self._start,)),)

    def span(self, item: ItemSize) -> MediaSpan:
        """Each line has a token for each cell, which takes a row, and one that ends it."""
        ids: list[int] = []
        runs = []
        for rows, columns in self._cropping.lines(item.width, item.height):
            first = len(ids) + 1
            runs += [(first + row * (columns + 1), columns) for row in range(rows)]
            line = [self._patch] * columns + [self._column]
            ids += [self._start, *line * rows, self._end]
        count = sum(length for _, length in runs)
        return MediaSpan(token_ids=tuple(ids), rows=count, embed_runs=tuple(runs))
