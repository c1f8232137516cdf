"""Whether the header of a safetensors file describes tensors that lie in it, each in its place. Without torch."""

import math
from collections.abc import Mapping
from typing import Any

from shared.text.cutting import cut

# Of safetensors' element types; one that is not here is the library's to refuse.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}
_LONGEST_NAME = 120


def find_fault(entries: Mapping[str, Any], nbytes: int) -> str:
    """What is wrong with a header whose tensors have `nbytes` of the file: the tensor's name and why; "" for a sound
    one. Tensors have to fill the file, one behind the other."""
    places = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        shown = f"the tensor {cut(name, _LONGEST_NAME)}"
        if why := _wrong_entry(entry):
            return f"{shown} {why}"
        places.append((*entry["data_offsets"], shown))
    end, before = 0, ""
    for first, last, shown in sorted(places):
        if first < end:
            return f"{before} and {shown} overlap"
        if first > end:
            return f"nothing is said of bytes {end:,} to {first:,} before {shown}"
        end, before = last, shown
    if nbytes > end:
        return f"{nbytes - end:,} bytes follow its last tensor"
    return ""


def _wrong_entry(entry: Any) -> str:
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "has no dtype, shape and data_offsets"
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str):
        return f"has the dtype {cut(repr(kind), 40)}"
    if not _are_sizes(shape):
        return f"has the shape {cut(repr(shape), 60)}"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the data_offsets {cut(repr(offsets), 60)}"
    if kind in _BITS:
        needed = math.prod(shape) * _BITS[kind]
        stored = offsets[1] - offsets[0]
        if needed != 8 * stored:
            return (
                f"is {kind} {cut(str(shape), 60)}, of {-(-needed // 8):,} bytes, and has {stored:,}"
            )
    return ""


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(size) is int and size >= 0 for size in values)
