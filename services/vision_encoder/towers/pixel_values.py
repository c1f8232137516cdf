"""Pixel values of items as tensors on a device: float32 as they came, or bytes that are scaled there."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.towers.encoder import Item


def squares(items: Sequence[Item], device: Device) -> Tensor:
    """[n, channels, side, side] of items of one square each, or several."""
    return torch.cat(pictures(items, device))


def pictures(items: Sequence[Item], device: Device) -> list[Tensor]:
    """[n, channels, height, width] of each item, of one picture or several of a size."""
    found = []
    for item, pixels in zip(items, _uploaded(items, device), strict=True):
        raw = pixels.view(-1, *pixels.shape[-3:])
        if item.scaling is not None:
            raw = device.ops.scale_pixels(raw.flatten(2), item.scaling).view(raw.shape)
        found.append(raw.to(device.dtype))
    return found


def patches(items: Sequence[Item], values: int, device: Device) -> Tensor:
    """[patches, values] of items one after the other, a value's channel before its place in time.

    Bytes may show one moment only: it then stands for all that a patch has.
    """
    together = []
    for item, raw in zip(items, _uploaded(items, device), strict=True):
        if item.scaling is not None:
            channels, moments = len(item.scaling.mean), values // raw.shape[1]
            found = device.ops.scale_pixels(raw.view(len(raw), channels, -1), item.scaling)
            raw = found[:, :, None].expand(-1, -1, moments, -1).reshape(len(raw), values)
        together.append(raw.to(device.dtype))
    return torch.cat(together)


def _uploaded(items: Sequence[Item], device: Device) -> list[Tensor]:
    # Copies: the arrays lie in files that are mapped for reading alone, which torch warns of.
    return device.upload(*(torch.from_numpy(np.array(item.pixels)) for item in items))
