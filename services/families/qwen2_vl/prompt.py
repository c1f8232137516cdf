"""Prompts of Qwen2-VL and Qwen2.5-VL: pictures keep their resolution, rounded to whole merged patches.

With `side` pixels to a merged patch (28 in the released checkpoints) the resized picture has

    rows = height / side * width / side

embedding rows. A video has as many for each `temporal_patch_size` frames, within bounds of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.families.family import ItemSize
from services.families.qwen2_vl.sizes import DEFAULTS, Resizing
from services.preprocess.media.item_options import Options
from services.preprocess.media.made_item import MadeItem
from services.preprocess.prompt.item_options import (
    FRAME_NAMES,
    PROCESSOR,
    check_names,
    whole,
    wrong,
)
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality

_DEFAULT_IMAGE_TOKEN = 151_655
_OLDER = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_OPTIONS = ("size", *_OLDER, *FRAME_NAMES)


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

    def options(self, given: Options, modality: Modality.ValueType) -> Options:
        """`size`, or one of its bounds under its older name, as the processor of transformers takes them."""
        check_names(given, _OPTIONS, PROCESSOR, self.family)
        usual = self._resizings[modality]
        size = {"shortest_edge": usual.least, "longest_edge": usual.most}
        wanted = given.get("size")
        if wanted is not None and not isinstance(wanted, dict):
            raise wrong(f"{PROCESSOR}.size", "must be an object")
        asked = {f"size.{edge}": (edge, value) for edge, value in (wanted or {}).items()}
        check_names(wanted or {}, size, f"{PROCESSOR}.size", self.family)
        asked |= {old: (edge, given.get(old)) for old, edge in _OLDER.items()}
        asked = {name: found for name, found in asked.items() if found[1] is not None}
        for name, (edge, value) in asked.items():
            limit = "the checkpoint's own size.longest_edge"
            size[edge] = whole(f"{PROCESSOR}.{name}", value, 1, usual.most, limit)
        # The least that is not asked for yields, as it does in transformers.
        has_least = any(edge == "shortest_edge" for edge, _ in asked.values())
        if has_least and size["shortest_edge"] > size["longest_edge"]:
            raise wrong(
                f"{PROCESSOR}.{next(reversed(asked))}",
                f"leaves no size: {size['shortest_edge']} pixels at least are more than {size['longest_edge']} at most",
            )
        return {"size": size} if asked else {}

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return [Update(modality, (token,)) for modality, token in self._tokens.items()]

    def span(self, item: ItemSize) -> MediaSpan:
        """A placeholder for each merged patch of each step of time; the last frame stands in for those that a step
        lacks."""
        columns, rows = self._resized(item)
        steps = max(1, -(-item.frames // self._frames))
        count = steps * columns * rows
        return MediaSpan(
            token_ids=(self._tokens[item.modality],) * count,
            rows=count,
            grid=(steps, rows * self._merge, columns * self._merge),
            frames_per_step=self._frames if item.modality == Modality.MODALITY_VIDEO else 0,
        )

    def _resized(self, item: ItemSize) -> tuple[int, int]:
        """Columns and rows of merged patches. Raises InvalidRequest for more than the encoder has room for, which long
        pictures that are stretched to `min_pixels` may have.
        """
        usual = self._resizings[item.modality]
        options = item.options if isinstance(item, MadeItem) else {}
        if not options:
            return usual.merged(item.width, item.height)
        size = options["size"]
        resizing = replace(usual, least=size["shortest_edge"], most=size["longest_edge"])
        columns, rows = resizing.merged(item.width, item.height)
        if (pixels := columns * rows * usual.side**2) > max(usual.most, usual.side**2):
            raise wrong(
                PROCESSOR,
                f"makes {pixels} pixels of an item of {item.width} x {item.height}; the checkpoint's own size allows"
                f" {usual.most}",
            )
        return columns, rows
