"""Calls, time and bytes of every op of a device, for finding what a step is made of."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor

from services.decoder.devices.base.attention_meta import AttnMeta, Packed, PagedKV
from services.decoder.devices.base.device import Device
from services.decoder.devices.base.ops import BaseOps

# What a model calls in a step. A whole layer is not among them: it runs in its composable form.
_OPS = (
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "linear",
    "linear_float32",
    "largest",
    "swiglu",
    "gate_up_swiglu",
    "rope",
    "head_norms",
    "qkv_rope_write",
    "kv_write",
    "paged_attention",
    "copy_blocks",
    "swap_blocks",
)


@dataclass
class OpTotal:
    """What the calls of one op took; `nbytes`: of weights, rows and cache that they read and wrote."""

    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0


class OpProfile:
    """Measures the ops of a device from its making on. An op that another one calls counts as a part of that one.

    The device is waited for after each op, so a step takes longer than without.
    """

    def __init__(self, device: Device) -> None:
        self.totals: dict[str, OpTotal] = {}
        self._device = device
        self._inside = False  # an op
        ops = device.ops
        for name in _OPS:
            setattr(ops, name, partial(self._measured, name, getattr(ops, name)))
        setattr(ops, "decoder_layer", MethodType(BaseOps.decoder_layer, ops))  # noqa: B010

    def clear(self) -> None:
        """Begins anew."""
        self.totals.clear()

    def table(self, seconds: float) -> str:
        """The totals as text, the longest first; `seconds`: of everything, the ops included."""
        lines = [f"{'op':<16}{'calls':>8}{'ms':>11}{'share':>8}{'GB':>9}{'GB/s':>8}"]
        ordered = sorted(self.totals.items(), key=lambda item: -item[1].seconds)
        rest = seconds - sum(total.seconds for total in self.totals.values())
        for name, total in (*ordered, ("outside of ops", OpTotal(0, rest, 0))):
            rate = total.nbytes / total.seconds / 1e9 if total.seconds > 0 else 0.0
            lines.append(
                f"{name:<16}{total.calls:>8}{1000 * total.seconds:>11.2f}{total.seconds / seconds:>8.1%}"
                f"{total.nbytes / 1e9:>9.3f}{rate:>8.1f}"
            )
        return "\n".join([*lines, f"{'total':<24}{1000 * seconds:>11.2f}"])

    def _measured(self, name: str, op: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._inside:
            return op(*given, **named)
        self._inside = True
        began = time.perf_counter()
        try:
            result = op(*given, **named)
            self._device.synchronize()
        finally:
            self._inside = False
        total = self.totals.setdefault(name, OpTotal())
        total.seconds += time.perf_counter() - began
        total.calls += 1
        read = () if name == "embedding" else given  # of the table only the rows that result
        total.nbytes += sum(map(_nbytes, read)) + _nbytes(result) + self._cache_bytes(name, given)
        return result

    def _cache_bytes(self, name: str, given: tuple[Any, ...]) -> int:
        """Of the tokens that attention reads, or another op writes."""
        meta = next((value for value in given if isinstance(value, AttnMeta)), None)
        kv = next((value for value in given if isinstance(value, PagedKV)), None)
        if meta is None or kv is None:
            return 0
        tokens = sum(meta.kv_lens) if name == "paged_attention" else meta.cu_q[-1]
        ops = self._device.ops
        capacity = kv.k.shape[ops.block_axis] * ops.block_size
        return tokens * ((kv.k.nbytes + kv.v.nbytes) // capacity)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Packed):
        return _nbytes(value.weight) + _nbytes(value.bias)
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else 0
