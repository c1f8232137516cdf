"""The numbers of `Float8Layout`."""

import torch
from torch import Tensor

from shared.weights.layouts.float8 import Float8Layout
from shared.weights.layouts.layout import NOT_FINITE, BadCodes
from shared.weights.readers.layout import ALL, Tensors


class Float8(Float8Layout):
    """Layers whose codes are numbers: they are read as such."""

    def numbers(self, tensors: Tensors, rows: slice, columns: slice) -> Tensor:
        """float32 [rows, columns] of the weight, each slice with a begin and an end. Raises BadCodes."""
        found = tensors.part("weight", rows, columns).float()
        scales = self._scales(tensors, rows, columns)
        if not bool(scales.isfinite().all()):
            raise BadCodes(self.scale, NOT_FINITE)
        return found.mul_(scales)

    def _scales(self, tensors: Tensors, rows: slice, columns: slice) -> Tensor:
        """float32, of a shape that is broadcast over those."""
        if self.codes.block is None:
            if self.codes.one_scale:
                return tensors.whole(self.scale).float().reshape(1, 1)
            return tensors.part(self.scale, rows, ALL).float()
        high, wide = self.codes.block
        down, across = _blocks(rows, high), _blocks(columns, wide)
        first, last = (slice(int(which[0]), int(which[-1]) + 1) for which in (down, across))
        scales = tensors.part(self.scale, first, last).float()
        return scales[down - down[0]][:, across - across[0]]


def _blocks(places: slice, size: int) -> Tensor:
    """The block that each place is in."""
    return torch.arange(places.start, places.stop) // size
