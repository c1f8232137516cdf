"""How Fuyu cuts pictures into patches: those that are too large are shrunk first, none is enlarged."""

from dataclasses import dataclass
from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from tessera.common.v1.media_pb2 import Modality

CHANNELS = 3
_PATCH = 30
# As the image processor of transformers has them.
_DEFAULTS: dict[str, Any] = {
    "size": {"height": 1080, "width": 1920},
    "patch_size": {"height": _PATCH, "width": _PATCH},
    "do_resize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_normalize": True,
    "padding_mode": "constant",
    "padding_value": 1.0,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": 0.5,
    "image_std": 0.5,
}
_PASSED_ON = ("resample", "rescale_factor", "image_mean", "image_std")


@dataclass(frozen=True)
class Patching:
    """`height`, `width`: what a picture is shrunk to at most; `patch`: edge of a square patch. All in pixels."""

    height: int
    width: int
    patch: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Patching":
        """By preprocessor_config.json and config.json. Raises InvalidRequest for what is not served."""
        config, given = checkpoint.config, _settings(checkpoint)
        patch = int(config.get("patch_size", _PATCH))
        height, width = int(given["size"]["height"]), int(given["size"]["width"])
        found = {key: int(given["patch_size"][key]) for key in ("height", "width")}
        asked = {
            "num_channels": config.get("num_channels", CHANNELS) == CHANNELS,
            "patch_size": patch > 0 and found == {"height": patch, "width": patch},
            "size": min(height, width) > 0 and height % patch == 0 and width % patch == 0,
            "padding_mode": given["padding_mode"] == "constant",
            **{
                key: bool(given[key]) for key in given if key in _DEFAULTS and key.startswith("do_")
            },
        }
        if wrong := [key for key, served in asked.items() if not served]:
            value = given.get(wrong[0], config.get(wrong[0]))
            more = f" with patches of {patch} in config.json" if wrong[0].endswith("size") else ""
            raise unsupported(checkpoint, f"{wrong[0]} is {value!r}{more}")
        return cls(height, width, patch)

    @property
    def values(self) -> int:
        """Of a patch."""
        return CHANNELS * self.patch**2

    def shrunk(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a picture as it is cut. The order of operations is transformers': the results have
        edges."""
        if width <= self.width and height <= self.height:
            return width, height
        scale = min(self.height / height, self.width / width)
        return max(1, int(width * scale)), max(1, int(height * scale))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches for a picture of so many pixels."""
        columns, rows = (-(-edge // self.patch) for edge in self.shrunk(width, height))
        return rows, columns


def tokens(rows: int, columns: int) -> int:
    """A token for each patch, one behind each row, and the one that begins the text."""
    return rows * (columns + 1) + 1


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    patching = Patching.read(checkpoint)
    width, height = patching.width, patching.height
    return ItemSize(width, height, tokens=tokens(*patching.grid(width, height)))


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `Family.processor_config`."""
    given, patching = _settings(checkpoint), Patching.read(checkpoint)
    return {
        "image_processor_type": "services.families.fuyu.image_processor:FuyuImageProcessor",
        "height": patching.height,
        "width": patching.width,
        "patch": patching.patch,
        "padding_value": int(given["padding_value"]),
        **{key: given[key] for key in _PASSED_ON},
    }


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    given = checkpoint.image_processor_config
    return _DEFAULTS | {key: value for key, value in given.items() if value is not None}
