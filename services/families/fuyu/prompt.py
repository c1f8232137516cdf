"""Fuyu's prompts: rows of patches before the text, each ended by a token, and a token that begins the answer."""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.fuyu.sizes import Patching
from services.preprocess.prompt.prompt_rule import (
    ImageProcessing,
    MediaSpan,
    Mode,
    Place,
    PromptRule,
    Update,
)
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_checkpoint
from shared.text.tokenizer_file import read_tokenizer
from shared.text.tokenizer_library import open_tokenizer
from tessera.common.v1.media_pb2 import Modality

# Of a patch, behind a row of them, before the text, and behind it.
_TOKENS = ("|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>")
_DEFAULT_PATCH_ID = 71011


class FuyuRule(PromptRule):
    """Patches by the picture's size. A text without a picture is the tokenizer's, as in transformers."""

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: 1}
    protected = _TOKENS[:2]

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        """Raises InvalidRequest for a tokenizer without the tokens, or with another patch than config.json."""
        self._patching = Patching.read(checkpoint)
        words = open_tokenizer(read_tokenizer(checkpoint.folder / "tokenizer.json"))
        ids = [words.token_to_id(token) for token in _TOKENS]
        known = [number for number in ids if number is not None]
        if len(known) < len(ids):
            missing = [token for token, number in zip(_TOKENS, ids, strict=True) if number is None]
            raise bad_checkpoint(checkpoint, f"the tokenizer lacks {', '.join(missing)}")
        self._patch, self._newline, self._begin, answer = known
        asked = checkpoint.config.get("image_token_id", _DEFAULT_PATCH_ID)
        if asked != self._patch:
            raise bad_checkpoint(
                checkpoint,
                f"{_TOKENS[0]} is token {self._patch}, image_token_id in config.json is {asked}",
            )
        self.media_ending = (answer,)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, Place.START, Mode.INSERT),)

    def span(self, item: ItemSize) -> MediaSpan:
        """Patches take rows; tokens that end a row of them, and the one that begins the text, do not."""
        rows, columns = self._patching.grid(item.width, item.height)
        line = (*[self._patch] * columns, self._newline)
        return MediaSpan(
            token_ids=(*line * rows, self._begin),
            rows=rows * columns,
            embed_runs=tuple((row * (columns + 1), columns) for row in range(rows)),
        )
