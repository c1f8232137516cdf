"""Checkpoints whose linear layers are numbers of 8 bits with scales, beside what they are in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints.coded import write_layers


@dataclass(frozen=True)
class Float8:
    """`method`: "fp8", "fbgemm_fp8", "modelopt" or "compressed-tensors"; `block`: outputs and inputs of a scale, None:
    one for each output, or with `one_scale` for all; `scalar`: that has no dimension."""

    method: str = "fp8"
    block: tuple[int, int] | None = (16, 48)
    one_scale: bool = False
    scalar: bool = False
    scales: torch.dtype = torch.float32

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        if self.method == "fp8":
            size = {} if self.block is None else {"weight_block_size": list(self.block)}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **size}
        if self.method == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
        if self.method == "fbgemm_fp8":
            return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
        weights = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block" if self.block else "tensor" if self.one_scale else "channel",
            "block_structure": self.block and list(self.block),
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }

    def stored(self, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """By the last part of the name, and the numbers in float32."""
        out, inputs = weight.shape
        high, wide = self.block or ((out, inputs) if self.one_scale else (1, inputs))
        drawn = torch.rand(
            (-(-out // high), -(-inputs // wide)), generator=torch.Generator().manual_seed(seed)
        )
        scales = drawn.add(0.5).div(100).to(self.scales)
        each = scales.repeat_interleave(high, 0)[:out].repeat_interleave(wide, 1)[:, :inputs]
        codes = (weight / each.float()).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if self.method == "fp8" and self.block else "weight_scale"
        kept = scales.reshape(()) if self.scalar else scales.flatten() if self.one_scale else scales
        found = {"weight": codes, name: kept.contiguous(), "input_scale": torch.ones(1)}
        return found, codes.float() * each.float()


def write_float8(folder: Path, dense: Path, how: Float8) -> Mapping[str, Tensor]:
    """See `write_layers`."""
    return write_layers(folder, dense, how.stored, how.config())
