"""Into how many tiles a picture of DeepSeek-VL2 is cut, and how many rows they become."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.families.deepseek_vl2.refusal import require
from services.families.deepseek_vl2.vision_config import VisionConfig
from services.families.family import ItemSize
from services.families.llava_next.sizes import best_resolution
from shared.checkpoint.files import read_json
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from tessera.common.v1.media_pb2 import Modality

GREY = (0.5, 0.5, 0.5)  # mean and deviation where no file names them
_LAYOUT = {"tile_tag": "2D", "global_view_pos": "head"}


@dataclass(frozen=True)
class Tiling:
    """`side`: edge of a tile in pixels; `line`: embedding rows along a tile's edge; `resolutions`: (height, width) in
    pixels, to one of which a picture is enlarged or reduced before it is cut."""

    side: int
    line: int
    resolutions: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Tiling":
        """Raises InvalidRequest for another tower, projector or layout, and for resolutions that are no whole tiles."""
        config = checkpoint.config
        require(checkpoint, "", config, _LAYOUT)
        vision = VisionConfig.read(checkpoint)
        side = vision.image_size
        own = _processor(checkpoint)
        # The processor counts rows by its own settings, the model makes them by those of config.json.
        made = {"patch_size": vision.patch_size, "downsample_ratio": vision.fold}
        for key, value in made.items():
            if own.get(key, value) != value:
                raise bad_option(
                    checkpoint, f"{key} is {value}, in processor_config.json {own[key]!r}"
                )
        resolutions = own.get("candidate_resolutions") or config["candidate_resolutions"]
        named = [[int(edge) for edge in pair] for pair in resolutions]
        wrong = [
            pair
            for pair in named
            if len(pair) != 2 or min(pair) < side or any(edge % side for edge in pair)
        ]
        if wrong or not named or named[0][0] != side:
            raise bad_option(
                checkpoint, f"candidate_resolutions {wrong or named[:1]} of tiles of {side} pixels"
            )
        return cls(side, vision.line, tuple((height, width) for width, height in named))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles of a picture of this many pixels."""
        tall, wide = best_resolution(width, height, self.resolutions)
        return wide // self.side, tall // self.side

    def views(self, width: int, height: int) -> int:
        """Its tiles, and one of the whole picture."""
        columns, rows = self.grid(width, height)
        return 1 + columns * rows

    def rows(self, width: int, height: int) -> int:
        """Embedding rows: lines of the whole picture, a separator, lines across all tiles; each line has an end."""
        columns, rows = self.grid(width, height)
        return self.line * (self.line + 1) + 1 + rows * self.line * (columns * self.line + 1)


def padding_colour(means: Sequence[float]) -> tuple[int, ...]:
    """Of what a picture does not fill: the mean of each channel, as bytes."""
    return tuple(int(mean * 255) for mean in means)


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`: a picture that fills one of the resolutions."""
    tiling = Tiling.read(checkpoint)
    sizes = [(width, height) for height, width in tiling.resolutions]
    width, height = max(sizes, key=lambda size: tiling.rows(*size))
    return ItemSize(width, height, tokens=tiling.rows(width, height))


def _processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """Settings of the model's own processor; nothing where no file has them."""
    path = checkpoint.folder / "processor_config.json"
    return read_json(path) if path.is_file() else {}


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `Family.processor_config`: by the settings that the model's own processor keeps, what they lack by
    config.json."""
    stored = {**_processor(checkpoint), **checkpoint.image_processor_config}
    tiling = Tiling.read(checkpoint)
    return {
        "image_processor_type": "services.families.deepseek_vl2.image_processor:TilesImageProcessor",
        "side": tiling.side,
        "line": tiling.line,
        "resolutions": tiling.resolutions,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": stored.get("normalize") is not False,
        "image_mean": list(stored.get("image_mean") or GREY),
        "image_std": list(stored.get("image_std") or GREY),
    }
