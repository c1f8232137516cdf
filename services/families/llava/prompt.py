"""LLaVA 1.5 (Liu et al. 2023) and checkpoints of its class: one `<image>` for each row of the tower's output.

    rows = (side // patch)^2 + class token of the tower - 1 if the select strategy is "default"

The patch size is taken from the tower, not from the processor: old processor files do not have it.
"""

from typing import Any

from services.preprocess.models.prompt_rule import ImageProcessing, ImagesOnly, MediaSpan
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

# model_type of the tower -> class tokens, and transformers' defaults for what config.json leaves
# out.
_TOWERS: dict[str, tuple[int, dict[str, int]]] = {
    "clip_vision_model": (1, {"patch_size": 32, "image_size": 224}),
    "siglip_vision_model": (0, {"patch_size": 16, "image_size": 224}),
}
DEFAULT_VISION = {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336}
_DEFAULT_IMAGE_TOKEN = 32000


class LlavaRule(ImagesOnly):
    """The number of rows is the same for every image, because the processor makes all of one size."""

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing, marker: str) -> None:
        config = checkpoint.config
        vision = checkpoint.vision_config or DEFAULT_VISION
        self.marker: str | None = marker
        self.marker_id = image_token_id(config)
        rows = tower_rows(config, vision, processing.shape)
        self._span = MediaSpan(token_ids=(self.marker_id,) * rows, rows=rows)

    def span(self, width: int, height: int) -> MediaSpan:
        """As many placeholders as the tower gives rows, whatever the size."""
        return self._span


def image_token_id(config: dict[str, Any]) -> int:
    """The placeholder's id, under its new or its old name."""
    for key in ("image_token_id", "image_token_index"):
        if config.get(key) is not None:
            return int(config[key])
    return _DEFAULT_IMAGE_TOKEN


def tower_rows(config: dict[str, Any], vision: dict[str, Any], shape: tuple[int, ...]) -> int:
    """Rows of one square image [channels, side, side]. Raises InvalidRequest if the tower takes others."""
    strategy = config.get("vision_feature_select_strategy", "default")
    kind = vision.get("model_type", "clip_vision_model")
    if kind not in _TOWERS:
        raise InvalidRequest("UNSUPPORTED_MODEL", f"LLaVA with a {kind} tower is not supported")
    class_tokens, defaults = _TOWERS[kind]
    patch, side = ({**defaults, **vision}[key] for key in ("patch_size", "image_size"))
    if tuple(shape[1:]) != (side, side):
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"the image processor makes {shape[1:]} pixels where the tower takes {(side, side)}:"
            " crop_size or size in preprocessor_config.json is wrong",
        )
    return int(side // patch) ** 2 + class_tokens - (1 if strategy == "default" else 0)
