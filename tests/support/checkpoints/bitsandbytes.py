"""Checkpoints whose linear layers are codes as bitsandbytes makes them and transformers saves them, beside what they
are in float32."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints.coded import write_layers

# As a file has them (`weight.quant_map`).
TABLES = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    "fp4": [
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204,
        0.25, 0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5,
        -0.1666666716337204, -0.25,
    ],
}  # fmt: skip


@dataclass(frozen=True)
class BitsAndBytes:
    """`kind`: "nf4", "fp4" or "int8"; `nested`: scales are codes too; `block`: codes of one scale."""

    kind: str
    nested: bool = False
    block: int = 32

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": self.kind != "int8",
            "load_in_8bit": self.kind == "int8",
            "bnb_4bit_quant_type": "fp4" if self.kind == "int8" else self.kind,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_use_double_quant": self.nested,
            "llm_int8_skip_modules": None,
        }

    def stored(self, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """By the last part of the name, and the numbers in float32."""
        if self.kind == "int8":
            largest = weight.abs().amax(1)
            codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
            format_ = torch.zeros((), dtype=torch.uint8)
            found = {"weight": codes, "SCB": largest, "weight_format": format_}
            return found, codes.float() * (largest / 127)[:, None]
        table = torch.tensor(TABLES[self.kind])
        blocks = weight.reshape(-1, self.block)
        parts, scales, said = self._scales(blocks.abs().amax(1))
        codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1)
        flat = codes.flatten().to(torch.uint8)
        state = {"quant_type": self.kind, "blocksize": self.block, "shape": list(weight.shape)}
        content = json.dumps({**state, "dtype": "bfloat16", **said}).encode()
        found = {
            "weight": (flat[::2] << 4 | flat[1::2])[:, None].contiguous(),
            "weight.quant_map": table,
            f"weight.quant_state.bitsandbytes__{self.kind}": torch.tensor(list(content)).byte(),
            **{f"weight.{name}": part for name, part in parts.items()},
        }
        return found, (table[codes] * scales[:, None]).view_as(weight)

    def _scales(self, largest: Tensor) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
        """What is stored of them, they themselves, and what is said."""
        if not self.nested:
            return {"absmax": largest}, largest, {}
        offset, table = float(largest.mean()), torch.linspace(-1, 1, 256)
        off = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
        nested = off.abs().amax(1)
        codes = (off / nested[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
        codes = codes[: len(largest)]
        scales = table[codes] * nested.repeat_interleave(256)[: len(largest)] + offset
        parts = {
            "absmax": codes.to(torch.uint8),
            "nested_absmax": nested,
            "nested_quant_map": table,
        }
        return parts, scales, {"nested_blocksize": 256, "nested_offset": offset}


def write_bitsandbytes(folder: Path, dense: Path, how: BitsAndBytes) -> Mapping[str, Tensor]:
    """See `write_layers`."""
    return write_layers(folder, dense, how.stored, how.config())
