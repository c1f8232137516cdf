"""LLaVA-NeXT's prompts: pictures of any resolution as squares of the tower's size.

A picture is shown whole as one square, and again at the best of the checkpoint's resolutions, which
are multiples of that square. With `side` patches along a square's edge:

    rows = side^2 + height * (width + 1)

where height and width, in patches, are those of the best resolution less the padding that keeps the
picture's proportions; each line of patches ends with one row more, the newline.
"""

from collections.abc import Mapping
from typing import Any

from services.families.family import ItemSize
from services.families.llava.prompt import LlavaRule
from services.families.llava_next.sizes import Resolution, best_resolution, padding, resolutions
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest


class LlavaNextRule(LlavaRule):
    """Rows by the picture's size."""

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        super().__init__(checkpoint, processing)
        self._side = round(self.rows**0.5)
        self._pixels = processing.shape[-1]
        if self._side * self._side != self.rows:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"a square of {self.rows} rows is no map: vision_feature_select_strategy must"
                ' be "default" with a class token and "full" without one',
            )
        self._resolutions = _resolutions(checkpoint.config, processing.settings, self._pixels)

    def span(self, item: ItemSize) -> MediaSpan:
        """Placeholders of the whole picture's rows, then those of its map and the newlines."""
        best = best_resolution(item.width, item.height, self._resolutions)
        edges = [edge // self._pixels * self._side for edge in best]
        lines, axis = padding(item.width, item.height, *edges)
        edges[axis] -= 2 * lines
        rows = self.rows + edges[0] * (edges[1] + 1)
        return MediaSpan(token_ids=(self.image_token,) * rows, rows=rows)


def _resolutions(
    config: Mapping[str, Any], settings: Mapping[str, Any], pixels: int
) -> list[Resolution]:
    """The resolutions, which model and image processor must agree on."""
    model, processor = resolutions(config), resolutions(settings)
    wrong = [r for r in model if r[0] % pixels or r[1] % pixels or min(r) < 1]
    if wrong:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"image_grid_pinpoints {wrong} are no multiples of {pixels} pixels"
        )
    if model != processor:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"image_grid_pinpoints is {model} in config.json and {processor} in"
            " preprocessor_config.json",
        )
    return model
