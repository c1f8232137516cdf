"""The codes of bitsandbytes.

Codes of 4 bits are places in a table of 16 numbers between -1 and 1, and kernels want whole numbers of a byte. So the
table is multiplied by a number for which little is lost when it is rounded, and scales are divided by it: of a block
whose largest number is 1, nf4 is off by at most 0.0039 (the root of the mean of squares is 0.0017), as codes of 8 bits
would be, and fp4 by 0.0032, in two of its numbers. Who wants numbers gets those that are stored.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.weights.layouts.bitsandbytes import Bnb4Layout, Bnb8Layout, State, read_state
from shared.weights.layouts.layout import NOT_FINITE, BadCodes
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import ALL, Tensors, unsigned

_AT_ONCE = 1 << 22  # codes that become numbers together, of which each has 64 bits meanwhile
# What tables are multiplied by. Found by trying all to 127 in steps of a hundredth.
_TIMES: Mapping[str, float] = {"nf4": 112.03, "fp4": 120.0}
_CODES: Mapping[str, tuple[int, ...]] = {
    "nf4": (-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112),
    "fp4": (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30),
}


class Bnb4(Bnb4Layout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        state = _state(tensors)
        self._table(tensors, state)
        scales = self._scales(tensors, state, rows).div_(_TIMES[state.kind])
        codes = _bytes(tensors, state, rows)
        together = codes >> 4 | codes << 4
        return QuantizedWeight(together, scales, 4, state.block, codebook=_CODES[state.kind])

    def numbers(self, tensors: Tensors, rows: slice, columns: slice) -> Tensor:
        """float32 [rows, columns] of the weight, each slice with a begin and an end. Raises BadCodes."""
        state = _state(tensors)
        table = self._table(tensors, state)
        codes, scales = _bytes(tensors, state, rows), self._scales(tensors, state, rows)
        found = torch.empty((len(codes), columns.stop - columns.start))
        step = max(1, _AT_ONCE // state.inputs)
        for first in range(0, len(codes), step):
            part = slice(first, first + step)
            places = torch.stack((codes[part] >> 4, codes[part] & 15), -1).flatten(1).long()
            numbers = table[places].mul_(scales[part].repeat_interleave(state.block, 1))
            found[part] = numbers[:, columns]
        return found

    def _table(self, tensors: Tensors, state: State) -> Tensor:
        """float32 [16]."""
        table = tensors.whole("weight.quant_map")
        known = torch.tensor(_CODES[state.kind]) / _TIMES[state.kind]
        if not torch.allclose(table, known, rtol=0, atol=4e-3):
            raise BadCodes("weight.quant_map", f"it is not the table of {state.kind}")
        return table

    def _scales(self, tensors: Tensors, state: State, rows: slice) -> Tensor:
        """float32 [rows, blocks of a row], memory of its own."""
        each = state.inputs // state.block
        places = slice(rows.start * each, rows.stop * each)
        stored = tensors.whole("weight.absmax")[places]
        found = stored.clone()
        if state.nested_block:
            nested = tensors.whole("weight.nested_absmax")
            at = torch.arange(places.start, places.stop) // state.nested_block
            found = tensors.whole("weight.nested_quant_map")[stored.long()] * nested[at]
            found += state.offset
        if not bool(found.isfinite().all()):
            raise BadCodes(self.scales, NOT_FINITE)
        return found.view(-1, each)


class Bnb8(Bnb8Layout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        codes = unsigned(tensors.part("weight", rows, ALL))
        return QuantizedWeight(codes, tensors.whole("SCB")[rows, None] / 127, 8, 0)


def _state(tensors: Tensors) -> State:
    def beside(tensor: str) -> bytes | None:
        return tensors.whole(tensor).numpy().tobytes() if tensors.has(tensor) else None

    return read_state(beside)


def _bytes(tensors: Tensors, state: State, rows: slice) -> Tensor:
    """uint8 [rows, inputs / 2] as they are stored."""
    each = state.inputs // 2
    return tensors.part("weight", slice(rows.start * each, rows.stop * each), ALL).view(-1, each)
