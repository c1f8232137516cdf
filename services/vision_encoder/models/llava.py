"""LLaVA 1.5 (Liu et al. 2023): hidden states of a CLIP or SigLIP tower, then linear, gelu, linear.

    vision_feature_layer            hidden state to take, or several, concatenated; counted as in
    transformers, where
                                    0 is what enters the first layer and -1 what leaves the last
    vision_feature_select_strategy  "default" drops the first row (CLIP's class token), "full" keeps
    all

Layers above the last hidden state that is taken are neither loaded nor run.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from services.vision_encoder import pixel_values, weights
from services.vision_encoder.cpu.llava_tower import LlavaTower
from services.vision_encoder.cpu.ops import TowerOps
from services.vision_encoder.models.vision_model import BadPixels, VisionItem
from shared.checkpoint import Checkpoint
from shared.errors import Unavailable

_TOWERS = ("clip_vision_model", "siglip_vision_model")
# Old checkpoints have `vision_tower.vision_model.`, new ones may have `model.` before everything.
_PARTS = (
    (re.compile(r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)"), "tower."),
    (re.compile(r"(?:model\.)?multi_modal_projector\.(.+)"), "projector."),
    (re.compile(r"(?:model\.)?image_(newline)"), ""),
)
_LAYER = re.compile(r"tower\.encoder\.layers\.(\d+)\.")


class LlavaNetwork(nn.Module):
    """The vision part of the checkpoint, as far as it is used."""

    def __init__(self, config: Any, layers: int) -> None:
        super().__init__()
        vision = copy.deepcopy(config.vision_config)
        vision.num_hidden_layers = layers
        vision.vision_use_head = False  # SigLIP's pooling, which LLaVA does not look at
        self.tower = AutoModel.from_config(vision)  # type: ignore[no-untyped-call]
        self.projector = LlavaMultiModalProjector(config)


class LlavaVision:
    """Tower and projector of one checkpoint."""

    stacked = True
    config_class: ClassVar[Any] = LlavaConfig
    network_class: ClassVar[type[LlavaNetwork]] = LlavaNetwork

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: the kernels that do the work instead of torch, where they know how."""
        config: Any = self.config_class.from_dict(checkpoint.config)
        vision = config.vision_config
        if vision.model_type not in _TOWERS:
            raise Unavailable(
                "UNSUPPORTED_MODEL",
                f"LLaVA with a {vision.model_type} tower is not supported; {', '.join(_TOWERS)} are",
            )
        self._layers = _hidden_states(config.vision_feature_layer, vision.num_hidden_layers)
        self._drops_first = config.vision_feature_select_strategy == "default"
        self._side, self._patch = int(vision.image_size), int(vision.patch_size)
        self._image_shape = (int(vision.num_channels), self._side, self._side)
        self.hidden_size = int(config.text_config.hidden_size)
        self.dtype = dtype
        self._device = device
        kept = max(self._layers)
        with torch.device("meta"):
            self._network = self.network_class(config, kept)

        def unused(name: str) -> bool:
            layer = _LAYER.match(name)
            return bool(
                (layer and int(layer[1]) >= kept)
                or name.startswith("tower.head.")
                or name.endswith(".position_ids")
            )

        weights.load(self._network, checkpoint, _names(checkpoint), unused, device, dtype)
        self._tower: Callable[[torch.Tensor], torch.Tensor] = self._run_network
        self.on_kernels = ops is not None and LlavaTower.knows(config)
        if ops is not None and self.on_kernels:
            self._tower = LlavaTower(self._network, config, self._layers, ops)

    def patches(self, item: VisionItem) -> int:
        """All images have one size. Raises BadPixels for another."""
        if item.pixels.shape != self._image_shape:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}, the tower takes"
                f" {list(self._image_shape)}"
            )
        return (self._side // self._patch) ** 2

    @torch.inference_mode()
    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each image of pixel values [channels, side, side]."""
        return list(self._features(items).cpu())

    def sample(self) -> VisionItem:
        """A black image."""
        return VisionItem(np.zeros(self._image_shape, np.float32))

    def _features(self, items: Sequence[VisionItem]) -> torch.Tensor:
        """Projected rows [n, rows, hidden_size] of all squares of the items."""
        return self._tower(pixel_values.squares(items, self._device, self.dtype))

    def _run_network(self, batch: torch.Tensor) -> torch.Tensor:
        states = self._network.tower(batch, output_hidden_states=self._layers).hidden_states
        taken = [states[layer] for layer in self._layers]
        if self._drops_first:
            taken = [state[:, 1:] for state in taken]
        rows: torch.Tensor = self._network.projector(torch.cat(taken, dim=-1))
        return rows


def _hidden_states(layer: Any, count: int) -> list[int]:
    """Indices of the hidden states to take, counted from the front."""
    wanted = [layer] if isinstance(layer, int) else list(layer)
    found = [index + count + 1 if index < 0 else index for index in wanted]
    if not found or not all(0 <= index <= count for index in found):
        raise Unavailable(
            "BAD_CHECKPOINT", f"vision_feature_layer {layer} is outside the tower's {count} layers"
        )
    return found


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file and the name in the network."""
    for name in checkpoint.names():
        for pattern, prefix in _PARTS:
            match = pattern.fullmatch(name)
            if match:
                yield name, prefix + match[1]
