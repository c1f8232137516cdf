"""InternVL's prompts: a mark, the rows of a picture's tiles, a mark."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.families.family import ItemSize
from services.families.internvl_chat.sizes import Tiling
from services.preprocess.media.item_options import Options
from services.preprocess.media.made_item import MadeItem
from services.preprocess.prompt.item_options import PROCESSOR, check_names, whole, wrong
from services.preprocess.prompt.prompt_rule import ImageProcessing, MediaSpan, PromptRule, Update
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.tokenizer_file import read_tokenizer
from tessera.common.v1.media_pb2 import Modality

_TOKENS = ("<img>", "<IMG_CONTEXT>", "</img>")
_BOUNDS = {
    "least": ("min_dynamic_patch", "min_patches"),
    "most": ("max_dynamic_patch", "max_patches"),
}
_FLAGS = ("dynamic_image_size", "crop_to_patches")
_OPTIONS = (*_BOUNDS["least"], *_BOUNDS["most"], *_FLAGS)


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

    def options(self, given: Options, modality: Modality.ValueType) -> Options:
        """Bounds of the number of tiles, under vLLM's names and those of transformers' processor."""
        check_names(given, _OPTIONS, PROCESSOR, self.family)
        own = self._tiling
        limit = "the checkpoint's own max_dynamic_patch"
        found = {"least": own.least, "most": own.most}
        for bound, names in _BOUNDS.items():
            asked = [name for name in names if given.get(name) is not None]
            if len(asked) > 1:
                raise wrong(
                    f"{PROCESSOR}.{asked[1]}", f"is {asked[0]} under another name: give one"
                )
            for name in asked:
                found[bound] = whole(f"{PROCESSOR}.{name}", given[name], 1, own.most, limit)
        for name in _FLAGS:
            cuts = given.get(name)
            if not isinstance(cuts, bool | None):
                raise wrong(f"{PROCESSOR}.{name}", "must be true or false")
            if cuts and own.most == 1:
                raise wrong(
                    f"{PROCESSOR}.{name}",
                    "cannot be true: this checkpoint cuts no pictures into tiles",
                )
            if cuts is False:
                found = {"least": 1, "most": 1}
        least, most = found["least"], found["most"]
        if least > most:
            name = next(name for name in given if name not in _FLAGS)
            raise wrong(f"{PROCESSOR}.{name}", f"leaves no number of tiles: from {least} to {most}")
        return {"min_patches": least, "max_patches": most, "crop_to_patches": most > 1}

    def updates(self) -> Sequence[Update]:
        """See `PromptRule.updates`."""
        return (Update(Modality.MODALITY_IMAGE, (self._start,)),)

    def span(self, item: ItemSize) -> MediaSpan:
        """The rows of all tiles between their marks."""
        tiling = self._tiling
        if isinstance(item, MadeItem) and (options := item.options):
            tiling = replace(tiling, least=options["min_patches"], most=options["max_patches"])
        rows = tiling.tiles(item.width, item.height) * tiling.rows
        return MediaSpan(
            token_ids=(self._start, *[self._row] * rows, self._end),
            rows=rows,
            embed_runs=((1, rows),),
        )
