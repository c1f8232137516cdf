"""Quantized copies of a text checkpoint: `python -m benchmarks.checkpoints.compressed MODEL w8a8|w4a16 FOLDER`.

The layout is compressed-tensors', which vLLM and Tessera both read: `w8a8` has int8 weights with a scale for each
output and asks for activations quantized token by token, `w4a16` int4 weights with a scale for each 128 inputs. Codes
are the nearest ones; all linear layers but the output head are quantized.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_LINEAR = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+)\.weight")
_GROUP = 128


def _w8a8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale.bfloat16()}


def _w4a16(weight: Tensor) -> dict[str, Tensor]:
    out, inputs = weight.shape
    groups = weight.view(out, inputs // _GROUP, _GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7).add(8).to(torch.int64).view(out, inputs // 8, 8)
    words = (codes << torch.arange(0, 32, 4)).sum(2).to(torch.int32)
    return {
        "weight_packed": words,
        "weight_scale": scale[:, :, 0].bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


_FORMS: dict[str, tuple[str, Callable[[Tensor], dict[str, Tensor]], dict[str, object]]] = {
    "w8a8": (
        "int-quantized",
        _w8a8,
        {
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        },
    ),
    "w4a16": (
        "pack-quantized",
        _w4a16,
        {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": _GROUP,
            },
            "input_activations": None,
        },
    ),
}


def main(arguments: list[str]) -> int:
    """Returns 2 for bad usage."""
    if len(arguments) != 3 or arguments[1] not in _FORMS:
        print(__doc__)
        return 2
    model, folder = Path(arguments[0]), Path(arguments[2])
    layout, quantize, scheme = _FORMS[arguments[1]]
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if found := _LINEAR.fullmatch(name):
                parts = quantize(value.float())
                tensors |= {f"{found[1]}.{part}": stored for part, stored in parts.items()}
            else:
                tensors[name] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
