"""Checkpoints whose linear layers are codes, in every layout that is read, beside the same weights as numbers."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_BLOCKS = r"(?:self_attn|self_attention|attention|attn|mlp|feed_forward)"
LAYERS = re.compile(rf"((?:\w+\.)*(?:layers|h)\.\d+\.{_BLOCKS}\.\w+)\.weight")
# All but tables and the output matrix, those of encoders and projectors too.
EVERY_LINEAR = re.compile(r"(?!.*(?:embed|lm_head))((?:\w+\.)*\w+)\.weight")
_ENCODER = re.compile(r"vision|visual|tower")
# Of a layer's weight and a seed what is stored, by the last part of the name, and the numbers in float32.
Stored = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Coded:
    """`kind`: "awq", "gptq", "pack-quantized" or "int-quantized"; `ordered`: inputs belong to groups in an order that
    follows from their number, equal in all layers."""

    kind: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    version: str = "gptq"
    ordered: bool = False
    one_scale: bool = False

    def stored(self, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """What is stored of a layer of the shape of `weight`, and its numbers: see `Stored`."""
        layer = Layer.draw(self, weight.shape[0], weight.shape[1], seed)
        return layer.stored(self), layer.dense().float()

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        group = self.group or -1
        if self.kind == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
        if self.kind == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": group,
                "sym": self.symmetric,
                "desc_act": self.ordered,
                "checkpoint_format": self.version,
            }
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "tensor" if self.one_scale else "group" if self.group else "channel",
            "group_size": self.group or None,
            "actorder": "group" if self.ordered else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.kind,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }


@dataclass(frozen=True)
class Layer:
    """`codes` [out, inputs] and `zeros` [out, groups], int64; `scales` float16 [out, groups]; `groups` [inputs]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    @classmethod
    def draw(cls, how: Coded, out: int, inputs: int, seed: int) -> "Layer":
        """One at random."""
        generator = torch.Generator().manual_seed(seed)
        count, most = inputs // how.group if how.group else 1, 2**how.bits
        zeros = torch.randint(1, most, (out, count), generator=generator)
        scales = torch.rand((out, count), generator=generator).add(0.5).div(2 * most).half()
        groups = torch.arange(inputs) // (how.group or inputs)
        if how.ordered:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        return cls(
            torch.randint(0, most, (out, inputs), generator=generator),
            torch.full_like(zeros, most // 2) if how.symmetric else zeros,
            scales[:1, :1].expand(out, 1) if how.one_scale else scales,
            groups,
        )

    def dense(self) -> Tensor:
        """float64 [out, inputs]."""
        zeros, scales = self.zeros[:, self.groups], self.scales.double()[:, self.groups]
        return (self.codes - zeros) * scales

    def stored(self, how: Coded) -> dict[str, Tensor]:
        """By the last part of the name."""
        bits, out = how.bits, self.codes.shape[0]
        if how.kind == "awq":
            order = [first + i for first in range(0, out, 8) for i in _AWQ_ORDER]
            return {
                "qweight": _words(self.codes.T[:, order], 4),
                "qzeros": _words(self.zeros.T[:, order], 4),
                "scales": self.scales.T.contiguous(),
            }
        if how.kind == "gptq":
            return {
                "qweight": _words(self.codes, bits).T.contiguous(),
                "qzeros": _words(self.zeros.T - int(how.version == "gptq"), bits),
                "scales": self.scales.T.contiguous(),
                "g_idx": self.groups.int(),
            }
        found = {"weight_scale": (self.scales[0] if how.one_scale else self.scales).contiguous()}
        if how.kind == "int-quantized":
            half = 2 ** (bits - 1)
            found |= {"weight": (self.codes - half).to(torch.int8), "input_scale": torch.ones(1)}
            zeros = (self.zeros - half).to(torch.int8)
        else:
            found["weight_packed"] = _words(self.codes, bits)
            found["weight_shape"] = torch.tensor(self.codes.shape)
            zeros = _words(self.zeros.T, bits).T.contiguous()
        if not how.symmetric:
            found["weight_zero_point"] = zeros
        return found | ({"weight_g_idx": self.groups.int()} if how.ordered else {})


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, m * bits / 32] of [n, m], the first code in the lowest bits."""
    each = 32 // bits
    parts = [codes[:, i::each] << bits * i for i in range(each)]
    return torch.stack(parts).sum(0).to(torch.int32)


def write_coded(folder: Path, dense: Path, how: Coded) -> Mapping[str, Layer]:
    """`folder`: the checkpoint `dense` with new layers, as codes; in `dense` they are numbers then. Gives the layers by
    name."""
    shutil.copytree(dense, folder)
    tensors = load_file(dense / "model.safetensors")
    coded, layers = dict(tensors), {}
    for seed, name in enumerate(sorted(tensors)):
        found = LAYERS.fullmatch(name)
        if found and tensors[name].ndim == 2 and not _ENCODER.search(name):
            out, inputs = tensors[name].shape
            layer = Layer.draw(how, out, inputs, seed)
            layers[found[1]], tensors[name] = layer, layer.dense().float()
            del coded[name]
            coded |= {f"{found[1]}.{part}": value for part, value in layer.stored(how).items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    edit_quantization(folder, **how.config())
    return layers


def write_layers(
    folder: Path,
    dense: Path,
    stored: Stored,
    config: Mapping[str, Any],
    layers: re.Pattern[str] = LAYERS,
) -> Mapping[str, Tensor]:
    """`folder`: the checkpoint `dense` with its linear layers, whose weights `layers` matches, as `stored` makes them,
    and what `config` says; in `dense` they are the numbers that these mean then. Gives those by name."""
    shutil.copytree(dense, folder)
    tensors = load_file(dense / "model.safetensors")
    coded, numbers = dict(tensors), {}
    for seed, name in enumerate(sorted(tensors)):
        if (found := layers.fullmatch(name)) and tensors[name].ndim == 2:
            del coded[name]
            parts, tensors[name] = stored(tensors[name].float(), seed)
            numbers[found[1]] = tensors[name]
            coded |= {f"{found[1]}.{part}": value for part, value in parts.items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    edit_quantization(folder, **config)
    return numbers


def edit_quantization(folder: Path, **changes: Any) -> None:
    """Changes of `quantization_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | changes
    path.write_text(json.dumps(config))
