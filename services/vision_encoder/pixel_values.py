"""Pixel values of items as tensors: float32 as they came, or bytes through the table of their scaling."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from services.vision_encoder.towers.encoder import Item
from shared.artifacts.pixel_scaling import PixelScaling


def squares(items: Sequence[Item], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, channels, side, side] of items of one square each, or several."""
    side = items[0].pixels.shape[-3:]
    apart = [item.pixels.reshape(-1, *side) for item in items]
    together = []
    for item, pixels in zip(items, apart, strict=True):
        raw = torch.from_numpy(np.array(pixels)).to(device)
        if item.scaling is not None:
            raw = _scaled(raw.flatten(2), item.scaling, dtype).view(raw.shape)
        together.append(raw.to(dtype))
    return torch.cat(together)


def patches(items: Sequence[Item], values: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[patches, values] of items one after the other, a value's channel before its place in time.

    Bytes may show one moment only: it then stands for all that a patch has.
    """
    together = []
    for item in items:
        raw = torch.from_numpy(np.array(item.pixels)).to(device)
        if item.scaling is not None:
            channels, moments = len(item.scaling.mean), values // raw.shape[1]
            found = _scaled(raw.view(len(raw), channels, -1), item.scaling, dtype)
            raw = found[:, :, None].expand(-1, -1, moments, -1).reshape(len(raw), values)
        together.append(raw.to(dtype))
    return torch.cat(together)


def _scaled(raw: Tensor, scaling: PixelScaling, dtype: torch.dtype) -> Tensor:
    """uint8 [n, channels, m] as values of `dtype`."""
    table = _table(scaling, raw.device, dtype)
    out = torch.empty(raw.shape, dtype=dtype, device=raw.device)
    for channel, entries in enumerate(table):
        places = raw[:, channel].reshape(-1).to(torch.int32)
        out[:, channel] = entries.index_select(0, places).view(len(raw), -1)
    return out


@lru_cache(maxsize=4)
def _table(scaling: PixelScaling, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(scaling.table()).to(device, dtype)
