"""DeepSeek-VL2's prompts: the rows of a picture in the place of `<image>`."""

from collections.abc import Mapping, Sequence

from services.families.deepseek_vl2.sizes import GREY, Tiling, padding_colour
from services.families.family import ItemSize
from services.preprocess.media.fitted_picture import Square
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.text.tokenizer_file import read_tokenizer
from tessera.common.v1.media_pb2 import Modality

_TOKEN = "<image>"
_MOST_TILED = 2  # pictures of a prompt


class DeepSeekVL2Rule(PromptRule):
    """Rows by the picture's size. The token's id is the tokenizer's.

    The model was trained to see pictures in tiles only where a prompt has one or two. Of more each is reduced to one
    tile first, and is then a picture of that size, with rows of its own.
    """

    limits: Mapping[Modality.ValueType, int | None] = {Modality.MODALITY_IMAGE: None}

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        """Raises InvalidRequest as `Tiling.read` does."""
        self._tiling = Tiling.read(checkpoint)
        red, green, blue = padding_colour(processing.settings.get("image_mean") or GREY)
        self._tile = Square(self._tiling.side, (red, green, blue))
        # Where no file has it, the processor adds it.
        self._token = read_tokenizer(checkpoint.folder / "tokenizer.json").ids()[_TOKEN]

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, (self._token,)),)

    def square(self, images: int) -> Square | None:
        """See `PromptRule.square`."""
        return self._tile if images > _MOST_TILED else None

    def span(self, item: ItemSize) -> MediaSpan:
        """As many of the token as there are rows, ends of lines and the separator among them."""
        rows = self._tiling.rows(item.width, item.height)
        return MediaSpan(token_ids=(self._token,) * rows, rows=rows)
