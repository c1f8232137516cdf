"""Checkpoints whose linear layers are numbers of 4 bits with scales, beside what they are in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints.coded import write_layers

_POSITIVE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = torch.cat((_POSITIVE, -_POSITIVE))  # by their codes


@dataclass(frozen=True)
class Float4:
    """`kind`: "nvfp4" or "mxfp4"; `method`: "compressed-tensors", or "modelopt" for the former and
    "auto-round" for the latter."""

    kind: str
    method: str = "compressed-tensors"

    @property
    def group(self) -> int:
        """Inputs of a scale."""
        return 16 if self.kind == "nvfp4" else 32

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        if self.method == "auto-round":
            return {
                "quant_method": "auto-round",
                "packing_format": "auto_round:llm_compressor",
                "data_type": "mx_fp",
                "bits": 4,
                "group_size": 32,
                "act_bits": 4,
                "sym": True,
            }
        if self.method == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group" if self.kind == "nvfp4" else "group",
            "group_size": self.group,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": f"{self.kind}-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }

    def stored(self, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """By the last part of the name, and the numbers in float32."""
        groups = weight.unflatten(1, (-1, self.group))
        wanted = groups.abs().amax(-1) / 6
        if self.kind == "nvfp4":
            whole = 448 / wanted.max().reshape(1)
            kept = (wanted * whole).to(torch.float8_e4m3fn)
            scales = kept.float() / whole
            parts = {"weight_scale": kept, "weight_global_scale": whole}
        else:
            exponents = wanted.log2().ceil()
            scales = exponents.exp2()
            parts = {"weight_scale": (exponents + 127).to(torch.uint8)}
        codes = (groups / scales[..., None])[..., None].sub(NUMBERS).abs().argmin(-1)
        numbers = (NUMBERS[codes] * scales[..., None]).view_as(weight)
        bytes_ = codes.flatten(1).to(torch.uint8)
        packed = bytes_[:, ::2] | bytes_[:, 1::2] << 4
        if self.method == "modelopt":
            unused = {name: torch.ones(()) for name in ("input_scale", "k_scale")}
            factor = 1 / parts.pop("weight_global_scale").reshape(())
            numbers = (NUMBERS[codes] * (kept.float() * factor)[..., None]).view_as(weight)
            return {"weight": packed, "weight_scale_2": factor, **unused, **parts}, numbers
        return {"weight_packed": packed, "input_global_scale": torch.ones(1), **parts}, numbers


def write_float4(folder: Path, dense: Path, how: Float4) -> Mapping[str, Tensor]:
    """See `write_layers`."""
    return write_layers(folder, dense, how.stored, how.config())
