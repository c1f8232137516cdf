"""Quantized layers of a `.flm` as checkpoints of compressed-tensors have them: the same codes, scales and zeros."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.checkpoint.conversion.flm.tensor import FlmTensor, TensorKind

_WEIGHT = ".weight"
_WORD = 8  # codes of 4 bits in one of 32 bits


@dataclass(frozen=True)
class KeptCodes:
    """What layers have to be to stay codes: a checkpoint has one scheme. `bits` of a code; `group`: inputs of a scale,
    0: all of an output's."""

    bits: int
    group: int

    @classmethod
    def of(cls, tensors: Sequence[FlmTensor]) -> "KeptCodes | None":
        """Which most elements have; None where no layer can stay as it is."""
        elements: Counter[KeptCodes] = Counter()
        for tensor in tensors:
            if (kind := _kind(tensor)) is not None:
                elements[kind] += tensor.elements
        return elements.most_common(1)[0][0] if elements else None

    def takes(self, tensor: FlmTensor) -> bool:
        """Whether a tensor stays codes; all others are written as numbers."""
        return _kind(tensor) == self

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": False,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.bits == 8 else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [],
        }

    def stored(self, tensor: FlmTensor) -> dict[str, Tensor]:
        """The tensors of a layer, by their names."""
        codes, scales, zeros = tensor.codes()
        if self.bits == 8:
            parts = {
                "weight": (codes.to(torch.int16) - 128).to(torch.int8),
                "weight_zero_point": (zeros.to(torch.int16) - 128).to(torch.int8),
            }
        else:
            parts = {
                "weight_packed": _words(codes),
                "weight_zero_point": _words(zeros.T).T.contiguous(),
                "weight_shape": torch.tensor(tensor.shape),
            }
        layer = tensor.name.removesuffix(_WEIGHT)
        return {
            f"{layer}.{part}": value for part, value in (parts | {"weight_scale": scales}).items()
        }


def _kind(tensor: FlmTensor) -> KeptCodes | None:
    """Of a linear layer's weight with ranges of its outputs; None for what has no such codes: embeddings, whose rows
    are read from the file, groups of which the last is a smaller one, and odd numbers of codes of 4 bits."""
    is_layer = (
        tensor.name.endswith(_WEIGHT) and "embed" not in tensor.name and len(tensor.shape) == 2
    )
    if not is_layer or not tensor.kind.is_quantized or tensor.axis != 0:
        return None
    inputs, bits = tensor.shape[1], tensor.kind.bits
    group = tensor.group_width if tensor.kind == TensorKind.INT4_GROUP else 0
    if (bits == 4 and inputs % 2) or (group and inputs % group):
        return None
    return KeptCodes(bits, group)


def _words(codes: Tensor) -> Tensor:
    """int32 [n, m / 8], rounded up, of uint8 [n, m] of 4 bits, the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _WORD))
    pairs = padded[:, ::2] | padded[:, 1::2] << 4
    return pairs.reshape(-1).view(torch.int32).view(len(codes), -1)
