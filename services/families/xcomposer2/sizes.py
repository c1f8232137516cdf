"""How large XComposer2's pictures are: VL sees one square, 4KHD the picture in tiles and once as a whole."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

TILE = 336  # edge in pixels
LINE = 12  # rows of embeddings in a line of a tile: its 24 x 24 patches, four as one
TOWER = "vit.vision_tower.vision_model."
WHOLE_MARK, LINE_MARK = "plora_glb", "plora_sub"  # "_GN" follows, in some folders "_gn"
_PATCHES = f"{TOWER}embeddings.patch_embedding.weight"
_SIDE = 490  # pixels of VL-7B's square
_MOST_TILES = 25
_PROCESSORS = "services.families.xcomposer2.image_processor"
# Of CLIP.
_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class Tiling:
    """`most`: tiles at most, 0 where there are none but the picture in a square of `side` pixels."""

    most: int
    side: int
    patch: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Tiling":
        """By the tensors that the checkpoint has."""
        tiled = any(name.startswith(WHOLE_MARK) for name in checkpoint.names())
        config = checkpoint.config
        return cls(
            most=int(config.get("hd_num") or _MOST_TILES) if tiled else 0,
            side=TILE if tiled else int(config.get("img_size") or _SIDE),
            patch=checkpoint.shape(_PATCHES)[-1],
        )

    def rows(self, width: int, height: int) -> int:
        """Embedding rows of a picture: the whole in 12 lines and a mark, then the tiles' lines, each with a mark."""
        if not self.most:
            return (self.side // self.patch) ** 2
        columns, lines = tiles(width, height, self.most)
        return (columns * lines + 1) * LINE**2 + 1 + (lines + 1) * LINE


def tiles(width: int, height: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles."""
    if width < height:
        return tiles(height, width, most)[::-1]
    columns = scale(width / height, most)
    return columns, ceil(inner_height(width / height, columns) / TILE)


def scale(ratio: float, most: int) -> int:
    """Tiles along the longer edge of a picture whose edges have this ratio, 1 or more."""
    count = 1
    while (count + 1) * ceil((count + 1) / ratio) <= most:
        count += 1
    return count


def inner_height(ratio: float, columns: int) -> int:
    """Pixels of the shorter edge before it is filled up to whole tiles, one at least."""
    return max(1, int(columns * TILE / ratio))


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """The image processor's settings, which no file of the checkpoint has."""
    tiling = Tiling.read(checkpoint)
    if not tiling.most:
        square = {"height": tiling.side, "width": tiling.side}
        return {
            **_COLOURS,
            "image_processor_type": "CLIPImageProcessor",
            "size": square,
            "do_center_crop": False,
        }
    return {
        **_COLOURS,
        "image_processor_type": f"{_PROCESSORS}:TilesImageProcessor",
        "size": {"height": TILE, "width": TILE},
        "do_center_crop": False,
        "most_tiles": tiling.most,
    }


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`: of all columns of tiles the highest."""
    tiling = Tiling.read(checkpoint)
    sizes = [
        (TILE * columns, TILE * (tiling.most // columns)) for columns in range(1, tiling.most + 1)
    ]
    width, height = max(
        sizes, key=lambda size: tiling.rows(*size), default=(tiling.side, tiling.side)
    )
    return ItemSize(width, height, tokens=tiling.rows(width, height))
