"""How large WeMM's pictures are: resized to an edge, seen in patches, and joined four by four of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality

JOINED = 4  # patches of an edge that become one row
_OWN_CLASS = "WeMMImageProcessor"
_OWN = {
    "image_processor_type": f"services.families.wemm.image_processor:{_OWN_CLASS}",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 756, "longest_edge": 1960},
}


@dataclass(frozen=True)
class Resizing:
    """`shortest`, `longest`: pixels of an edge. `enlarges`: small pictures too get the longest edge, and a patch that
    the picture fills in part counts; else only large ones are made smaller, and such patches are left out."""

    shortest: int
    longest: int
    enlarges: bool
    patch: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> "Resizing":
        """By the image processor's settings and the tower's patches. Raises InvalidRequest for those not served."""
        size = settings.get("size") or {}
        if {"shortest_edge", "longest_edge"} - size.keys():
            raise bad_checkpoint(
                checkpoint, f"image processor: size {size} has no shortest_edge and longest_edge"
            )
        patch = int((checkpoint.vision_config or {}).get("patch_size") or 32)
        own = str(settings.get("image_processor_type")).endswith(_OWN_CLASS)
        if own and patch != 14:
            raise bad_checkpoint(
                checkpoint, f"vision_config.patch_size is {patch}: pictures are made for 14"
            )
        return cls(int(size["shortest_edge"]), int(size["longest_edge"]), own, patch)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels. The shape changes where the shorter edge would be too short."""
        aspect = width / height
        if width >= height and (self.enlarges or width > self.longest):
            width, height = self.longest, int(self.longest / aspect)
        elif height > width and (self.enlarges or height > self.longest):
            width, height = int(self.longest * aspect), self.longest
        return max(width, self.shortest), max(height, self.shortest)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of a picture that is resized already."""
        if self.enlarges:
            return -(-height // self.patch), -(-width // self.patch)
        return height // self.patch, width // self.patch

    def rows(self, width: int, height: int) -> int:
        """Embedding rows of a picture of this size, a separator at each end among them."""
        return self.rows_of(*self.grid(*self.resized(width, height)))

    def rows_of(self, rows: int, columns: int) -> int:
        """The same for one of so many rows and columns of patches."""
        return -(-rows // JOINED) * -(-columns // JOINED) + 2


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """The image processor's settings: of "image_processor" in config.json those for WeMM's own, else those of
    preprocessor_config.json for Idefics2's. Raises InvalidRequest for pictures that are cut."""
    own = checkpoint.config.get("image_processor")
    if own is not None:
        settings = {**_OWN, **({"size": own["size"]} if own.get("size") else {})}
    else:
        settings = dict(checkpoint.image_processor_config)
        if not str(settings.get("image_processor_type")).startswith("Idefics2"):
            raise bad_checkpoint(
                checkpoint, "config.json has no image_processor, and no file one of Idefics2"
            )
    if checkpoint.config.get("do_image_splitting"):  # the one place where WeMM's code looks
        raise InvalidRequest(
            "UNSUPPORTED_MODEL",
            f"{checkpoint.folder}: do_image_splitting is not served: pictures are seen whole",
            field="model",
        )
    return {**settings, "do_image_splitting": False, "do_pad": False}


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`: a square."""
    resizing = Resizing.of(checkpoint, processor(checkpoint))
    side = resizing.longest
    return ItemSize(side, side, tokens=resizing.rows(side, side))
