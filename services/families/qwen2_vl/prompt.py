"""Prompts of Qwen2-VL and Qwen2.5-VL: pictures keep their resolution, rounded to whole merged patches.

With `side` pixels to a merged patch (28 in the released checkpoints) the resized picture has

    rows = height / side * width / side

embedding rows. A video has as many for each `temporal_patch_size` frames, within bounds of its own.
"""

from collections.abc import Mapping, Sequence

from services.families.family import ItemSize
from services.families.qwen2_vl.sizes import DEFAULTS, Resizing
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality

_DEFAULT_IMAGE_TOKEN = 151_655


class Qwen2VLRule(PromptRule):
    """Rows and grid by the picture's size."""

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        settings = {**DEFAULTS, **processing.settings}
        config, vision = checkpoint.config, checkpoint.vision_config or {}
        patch, merge = int(settings["patch_size"]), int(settings["merge_size"])
        expected = (vision.get("patch_size") or 14, vision.get("spatial_merge_size") or 2)
        if (patch, merge) != expected or not settings.get("do_resize", True):
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"the image processor makes patches of {patch} pixels and merges"
                f" {merge}, the tower takes {expected[0]} and {expected[1]}; do_resize must"
                " be true: see preprocessor_config.json",
            )
        self._merge = merge
        self._frames = int(settings["temporal_patch_size"])
        self._resizings = {
            Modality.MODALITY_IMAGE: Resizing.read(settings, settings.get("size")),
            Modality.MODALITY_VIDEO: Resizing.read(settings, settings.get("video_size")),
        }
        self._tokens = {
            Modality.MODALITY_IMAGE: int(config.get("image_token_id") or _DEFAULT_IMAGE_TOKEN)
        }
        if video_token := config.get("video_token_id"):
            self._tokens[Modality.MODALITY_VIDEO] = int(video_token)
        self.limits: Mapping[Modality.ValueType, int | None] = dict.fromkeys(self._tokens)

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return [Update(modality, (token,)) for modality, token in self._tokens.items()]

    def span(self, item: ItemSize) -> MediaSpan:
        """A placeholder for each merged patch of each step of time; the last frame stands in for those that a step
        lacks."""
        columns, rows = self._resizings[item.modality].merged(item.width, item.height)
        steps = max(1, -(-item.frames // self._frames))
        count = steps * columns * rows
        return MediaSpan(
            token_ids=(self._tokens[item.modality],) * count,
            rows=count,
            grid=(steps, rows * self._merge, columns * self._merge),
            frames_per_step=self._frames if item.modality == Modality.MODALITY_VIDEO else 0,
        )
