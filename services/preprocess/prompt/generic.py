"""Prompts of models without a rule of their own: what the checkpoint's own processor writes for each image."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from services.families import registry
from services.families.family import ItemSize, load_part
from services.preprocess.media.item_options import Options
from services.preprocess.media.made_item import MadeItem
from services.preprocess.prompt.item_options import PROCESSOR, check_names, whole, wrong
from services.preprocess.prompt.prompt_rule import (
    Example,
    ImageProcessing,
    MediaSpan,
    PromptRule,
    Update,
)
from services.preprocess.prompt.tokenizer import Ids
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

log = structlog.get_logger(__name__)

_COUNTS = ("min_pixels", "max_pixels", "min_patches", "max_patches", "max_image_tiles")
_SIZES = ("size",)
_FLAGS = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
_LIMIT = "the checkpoint's own"


class GenericRule(PromptRule):
    """Spans are the ids that the image worker gives for each image (`services.preprocess.worker.processor_maker`).

    Of a span those ids take an embedding row that the model's configuration calls its image token, all of them where
    the family's record says so ("rows").
    """

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing) -> None:
        settings = processing.settings
        record = registry.find(checkpoint)
        overrides = record.overrides
        finish = overrides.get("finish")
        self._finish: Callable[[Ids, Checkpoint], Ids] | None = (
            load_part(finish) if finish else None
        )
        self._checkpoint = checkpoint
        self._processor_name = str(settings["class"])
        self._image_settings = _settable(settings["processor"].get("image_processor") or {})
        self._takes_all = record.takes_all_rows
        most = overrides.get("most_images")
        most_images = int(most) if most else settings["most_images"]
        log.info(
            "prompts are written by the code of transformers",
            processor=settings["class"],
            transformers=settings["transformers"],
            most_images=most_images or "any",
        )
        before, after = settings["around"]
        self._update = Update(
            Modality.MODALITY_IMAGE, (settings["marker"],), around=(before, after)
        )
        self._placeholders = settings["placeholders"]
        self.limits: Mapping[Modality.ValueType, int | None] = {
            Modality.MODALITY_IMAGE: most_images
        }
        self.examples = [
            Example(found["text"], [_made(item) for item in found["items"]], found["ids"])
            for found in settings["examples"]
        ]

    @property
    def family(self) -> str:
        """The checkpoint's own processor."""
        return self._processor_name

    def options(self, given: Options, modality: Modality.ValueType) -> Options:
        """Numbers and sizes up to the checkpoint's own, and to leave pictures whole that its own settings cut."""
        own = self._image_settings
        check_names(given, tuple(own), PROCESSOR, self.family)
        found = {name: value for name, value in given.items() if value is not None}
        for name, value in found.items():
            field = f"{PROCESSOR}.{name}"
            if isinstance(own[name], dict):
                if not isinstance(value, dict):
                    raise wrong(field, "must be an object")
                check_names(value, own[name], field, self.family)
                found[name] = {
                    **own[name],
                    **{
                        edge: whole(f"{field}.{edge}", asked, 1, own[name][edge], _LIMIT)
                        for edge, asked in value.items()
                    },
                }
            elif isinstance(own[name], bool):
                if not isinstance(value, bool):
                    raise wrong(field, "must be true or false")
                if value and not own[name]:
                    raise wrong(
                        field,
                        "cannot be true: the checkpoint's own setting is false, and there is room for no more",
                    )
            else:
                found[name] = whole(field, value, 1, own[name], _LIMIT)
        return found

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (self._update,)

    def span(self, item: ItemSize) -> MediaSpan:
        """The item's own ids; the item must be a `MadeItem`."""
        assert isinstance(item, MadeItem)
        takes_row = np.isin(item.ids, item.ids if self._takes_all else self._placeholders)
        edges = np.flatnonzero(np.diff(takes_row, prepend=False, append=False))
        runs = [(int(start), int(end - start)) for start, end in edges.reshape(-1, 2)]
        return MediaSpan(
            token_ids=tuple(item.ids),
            rows=int(takes_row.sum()),
            embed_runs=() if takes_row.all() else tuple(runs),
            fields={name: _tensor(**value) for name, value in item.fields.items()},
        )

    def finish(self, ids: Ids) -> Ids:
        """See `PromptRule.finish`."""
        return self._finish(ids, self._checkpoint) if self._finish else ids


def _made(item: Mapping[str, Any]) -> MadeItem:
    return MadeItem(0, 0, ids=item["ids"], fields=item["fields"])


def _tensor(
    dtype: str, shape: Sequence[int], values: Sequence[Any]
) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.array(values, dtype).reshape(shape)


def _settable(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of an image processor's settings that a request may change, with the checkpoint's own values: numbers of
    pixels and tiles, the size, and whether pictures are cut.
    """
    found = {name: settings.get(name) for name in (*_COUNTS, *_SIZES, *_FLAGS)}
    known: dict[str, Any] = {}
    for name, value in found.items():
        if name in _SIZES and isinstance(value, Mapping):
            edges = {edge: most for edge, most in value.items() if isinstance(most, int)}
            if "longest_edge" in edges:  # else all pictures are of one size, that of the tower
                known[name] = edges
        elif isinstance(value, bool) if name in _FLAGS else isinstance(value, int):
            known[name] = value
    return known
