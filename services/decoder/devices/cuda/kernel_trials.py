"""Kernels in Triton's language are compiled and tried against torch before they are used: what fails is logged with its
reason, and torch computes in its place."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cuda import coded_linear, padded_attention
from services.decoder.devices.cuda.coded_linear import CodedLinear, Form
from services.decoder.steps.attention_meta import KVSpec

log = structlog.get_logger(__name__)

_KERNELS = "services.decoder.devices.cuda.kernels"
# Of the largest element: how far off a kernel may be.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
_OUTPUTS, _ROWS = 80, (1, 40)
_HEADS, _HEADS_OF_KEYS, _SIZE, _WINDOW = 6, 2, 64, 37
# Tokens of each row, and the keys that the last of them sees.
_STEPS = (([1, 1, 1], [3, 40, 300]), ([1, 33, 70], [90, 50, 70]))


def right_attention(ops: BaseOps) -> ModuleType | None:
    """`kernels/attention.py` where it is right on the device and in the type of these ops; None where torch attends."""
    return _right("attention", "attention", ops.dtype, lambda module: _attention_off(module, ops))


def right_linear(packed: CodedLinear, dtype: torch.dtype) -> ModuleType | None:
    """`kernels/linear.py` where it is right for weights of such codes and activations of this type."""
    what = f"products with codes of {packed.bits} bits"
    return _right("linear", what, dtype, lambda module: _linear_off(module, packed, dtype))


def has_triton() -> bool:
    """Whether its package is here; torch for CUDA brings it along."""
    return importlib.util.find_spec("triton") is not None


def _right(
    name: str, what: str, dtype: torch.dtype, off: Callable[[ModuleType], float]
) -> ModuleType | None:
    if not has_triton():
        reason = "there is no package triton"
    else:
        try:
            module = importlib.import_module(f"{_KERNELS}.{name}")
            found = off(module)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of compilers and drivers, of many kinds
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            if found <= _TOLERANCE[dtype]:
                return module
            reason = f"they give something else: {found:.2%} off"
    log.warning(f"{what} by torch alone, which is slow", reason=reason)
    return None


def _attention_off(module: ModuleType, ops: BaseOps) -> float:
    """The largest difference, as a part of the largest element."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(ops.device, ops.dtype)

    width = -(-max(_STEPS[0][1]) // ops.block_size)
    spec = KVSpec(_HEADS_OF_KEYS, _SIZE, _SIZE, ops.dtype)
    kv = ops.alloc_kv(spec, width + 1)
    kv.k.copy_(drawn(*kv.k.shape))
    kv.v.copy_(drawn(*kv.v.shape))
    table = torch.arange(width, 0, -1, dtype=torch.int32).expand(3, -1).contiguous().to(ops.device)
    worst = 0.0
    for counts, lengths in _STEPS:
        slots = torch.zeros(sum(counts), dtype=torch.int64, device=ops.device)
        meta, q = ops.make_meta(counts, lengths, table, slots), drawn(sum(counts), _HEADS, _SIZE)
        for window in (None, _WINDOW):
            found, expected = torch.zeros_like(q), torch.zeros_like(q)
            module.attend(q, kv, meta, found, _SIZE**-0.5, window)
            padded_attention.attend(q, kv, meta, expected, _SIZE**-0.5, window)
            worst = max(worst, _off(found, expected))
    return worst


def _linear_off(module: ModuleType, packed: CodedLinear, dtype: torch.dtype) -> float:
    """The same, of drawn codes of the same kind."""
    generator, device = torch.Generator().manual_seed(0), packed.weight.device
    groups = len(packed.scales)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(1, 16, shape, generator=generator).float()

    sizes = groups, _OUTPUTS
    scales, second = drawn(sizes) / 1024, None if packed.second is None else drawn(sizes)
    if packed.paired is not None:
        both = torch.stack((scales, drawn(sizes)), -1).to(packed.paired)
        scales = both.view(torch.int32)[..., 0]
    if packed.form is Form.TABLE:
        second = packed.second
    codes = torch.randint(0, 256, (_OUTPUTS, packed.weight.shape[1]), generator=generator)
    small = replace(
        packed,
        weight=codes.to(torch.uint8).view(packed.weight.dtype).to(device),
        bias=drawn((_OUTPUTS,)).to(device, dtype),
        scales=scales.to(device),
        second=None if second is None else second.to(device),
        order=None,
        activations=16,
    )
    every = slice(0, _OUTPUTS)
    worst = _off(module.numbers(small, every, dtype), coded_linear.numbers(small, every, dtype))
    for rows in _ROWS:
        x = torch.randn((rows, packed.columns), generator=generator).to(device, dtype)
        worst = max(worst, _off(module.product(x, small), coded_linear.product(x, small)))
    return worst


def _off(found: Tensor, expected: Tensor) -> float:
    """Infinite where something is no number."""
    difference = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(difference.nan_to_num(torch.inf, torch.inf))
