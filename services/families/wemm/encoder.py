"""WeMM's encoder: one picture after the other, each of its own shape."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig

from services.families.family import ItemSize
from services.families.wemm.network import WeMMNetwork
from services.families.wemm.sizes import JOINED, Resizing, processor
from services.vision_encoder import pixel_values, weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_PARTS = (
    (re.compile(r"vision_tower\.(.+)"), "tower."),
    (re.compile(r"downsampler\.(.+)"), "downsampler."),
    (re.compile(r"visual_source_spliter_emb\.(.+)"), "separators."),
)
_CHANNELS = 3


class WeMMEncoder:
    """Tower, downsampler and separators of one checkpoint."""

    stacked = False
    on_kernels = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: not used, torch does the work. Raises InvalidRequest for settings that are not served."""
        vision = Idefics2VisionConfig(**(checkpoint.vision_config or {}))
        self._resizing = Resizing.of(checkpoint, processor(checkpoint))
        self._patch = int(vision.patch_size)
        self.hidden_size = int(checkpoint.text_config["hidden_size"])
        self.dtype = dtype
        self._device = device
        downsampler = _downsampler(checkpoint)
        table = checkpoint.config["spliter_emb_config"]
        with torch.device("meta"):
            separators = (int(table["num_embeddings"]), int(table["embedding_dim"]))
            self._network = WeMMNetwork(vision, downsampler, separators)
        weights.load(
            self._network,
            checkpoint,
            weights.renamed(checkpoint, _PARTS),
            lambda name: False,
            device,
            dtype,
        )

    def cost(self, item: Item) -> int:
        """Patches. Raises BadPixels for what is no picture."""
        shape = item.pixels.shape
        if shape[:-3] not in ((), (1,)) or shape[-3] != _CHANNELS or min(shape[-2:]) < self._patch:
            raise BadPixels(
                f"pixel values are {list(shape)}, not one picture of {_CHANNELS} channels"
            )
        rows, columns = self._resizing.grid(shape[-1], shape[-2])
        return rows * columns

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each picture of pixel values [3, height, width]."""
        return [self._network(self._whole_patches(item)).cpu() for item in items]

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        width, height = self._resizing.resized(size.width, size.height)
        return pixel_item(np.zeros((_CHANNELS, height, width), np.float32))

    def _whole_patches(self, item: Item) -> torch.Tensor:
        """[3, height, width]: zeros, the middle of the values' range, fill the last patches, or these are cut off."""
        [pixels] = pixel_values.squares([item], self._device, self.dtype)
        rows, columns = self._resizing.grid(pixels.shape[2], pixels.shape[1])
        height, width = rows * self._patch, columns * self._patch
        return F.pad(pixels, (0, width - pixels.shape[2], 0, height - pixels.shape[1]))


def _downsampler(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its settings. Raises InvalidRequest if it does not join JOINED patches of an edge."""
    settings = dict(checkpoint.config["downsampler_config"])
    for name in ("kernel_size", "stride"):
        if settings.pop(name, 1) != JOINED:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"{checkpoint.folder}: downsampler_config.{name} is not {JOINED}",
                field="model",
            )
    known = ("visual_hidden_size", "llm_hidden_size", "depth", "hidden_act", "bias")
    return {name: settings[name] for name in known if name in settings}
