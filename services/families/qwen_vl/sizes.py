"""What config.json says of Qwen-VL's pictures: all have one size and as many rows."""

from dataclasses import dataclass
from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from tessera.common.v1.media_pb2 import Modality

MARKS = 1  # beside the rows: the token that begins a picture
ROWS = 256  # of the resampler, and places of the tower before they are resized to its patches
# Means and deviations of CLIP's pictures.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True)
class VisualConfig:
    """Tower and resampler. Sizes of pictures and patches are edges in pixels, others are numbers of elements."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    inner: int  # of the layers' MLPs
    output: int  # width of the language model
    start_token: (
        int  # begins a picture; then come the token that ends it and the one that stands for a row
    )

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "VisualConfig":
        """From `visual` of config.json. Raises InvalidRequest for sizes that do not divide."""
        given: dict[str, Any] = {
            "image_size": 448,
            "patch_size": 14,
            "width": 1664,
            "layers": 48,
            "heads": 16,
            "mlp_ratio": 4.9231,
            "output_dim": 4096,
            "image_start_id": 151_857,
            **checkpoint.config["visual"],
        }
        width, heads = int(given["width"]), int(given["heads"])
        side, patch = int(given["image_size"]), int(given["patch_size"])
        if width % heads or side % patch:
            raise bad_option(
                checkpoint,
                f"visual has {heads} heads in {width} elements and patches of"
                f" {patch} pixels in pictures of {side}, which do not divide",
            )
        return cls(
            image_size=side,
            patch_size=patch,
            width=width,
            layers=int(given["layers"]),
            heads=heads,
            inner=int(width * float(given["mlp_ratio"])),
            output=int(given["output_dim"]),
            start_token=int(given["image_start_id"]),
        )


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    config = VisualConfig.read(checkpoint)
    return ItemSize(config.image_size, config.image_size, tokens=ROWS + MARKS)


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `Family.processor_config`: pictures are stretched to a square."""
    side = VisualConfig.read(checkpoint).image_size
    return {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": side, "width": side},
        "resample": _BICUBIC,
        "image_mean": list(_MEAN),
        "image_std": list(_STD),
    }
