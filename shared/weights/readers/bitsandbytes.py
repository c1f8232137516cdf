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

_AT_ONCE = 1 << 22  # codes that become numbers together
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
        places = slice(rows.start * inputs, rows.stop * inputs)
        scales = self._scales(tensors, state, places).div_(_TIMES[state.kind])
        codes = _bytes(tensors, places).view(-1, inputs // 2)
        together = codes >> 4 | codes << 4
        scales = scales.view(len(codes), -1)
        return QuantizedWeight(together, scales, 4, state.block, codebook=_CODES[state.kind])

    def numbers(self, tensors: Tensors, rows: slice, columns: slice) -> Tensor:
        """float32 [rows, columns] of the weight, each slice with a begin and an end. Raises BadCodes."""
        state = _state(tensors)
        table = self._table(tensors, state)
        found = torch.empty((rows.stop - rows.start, columns.stop - columns.start))
        step = max(1, _AT_ONCE // state.inputs)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            places = slice(first * state.inputs, last * state.inputs)
            numbers = self._numbers(tensors, state, places, table)
            found[first - rows.start : last - rows.start] = numbers.view(last - first, -1)[
                :, columns
            ]
        return found

    def _table(self, tensors: Tensors, state: State) -> Tensor:
        """float32 [16]."""
        table = tensors.whole("weight.quant_map")
        known = torch.tensor(_CODES[state.kind]) / _TIMES[state.kind]
        if not torch.allclose(table, known, rtol=0, atol=4e-3):
            raise BadCodes("weight.quant_map", f"it is not the table of {state.kind}")
        return table

    def _numbers(self, tensors: Tensors, state: State, places: slice, table: Tensor) -> Tensor:
        """float32 [places] of some codes that follow each other."""
        bytes_ = torch.arange(256)
        pairs = torch.stack((table[bytes_ >> 4], table[bytes_ & 15]), -1)  # of all bytes
        found = pairs.index_select(0, _bytes(tensors, places).int()).flatten()
        odd, count = places.start % 2, places.stop - places.start
        found, scales = found[odd : odd + count], self._scales(tensors, state, places)
        begin = places.start % state.block
        if begin or count % state.block:
            return found.mul_(scales.repeat_interleave(state.block)[begin : begin + count])
        return found.view(-1, state.block).mul_(scales[:, None]).flatten()

    def _scales(self, tensors: Tensors, state: State, places: slice) -> Tensor:
        """float32 [blocks] of those that have some codes, memory of its own."""
        blocks = slice(places.start // state.block, -(-places.stop // state.block))
        stored = tensors.whole("weight.absmax")[blocks]
        found = stored.clone()
        if state.nested_block:
            nested = tensors.whole("weight.nested_absmax")
            at = torch.arange(blocks.start, blocks.stop) // state.nested_block
            found = tensors.whole("weight.nested_quant_map")[stored.long()] * nested[at]
            found += state.offset
        if not bool(found.isfinite().all()):
            raise BadCodes(self.scales, NOT_FINITE)
        return found


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


def _bytes(tensors: Tensors, places: slice) -> Tensor:
    """uint8, as they are stored: those that have some codes that follow each other."""
    rows = slice(places.start // 2, -(-places.stop // 2))
    return tensors.part("weight", rows, ALL).flatten()
