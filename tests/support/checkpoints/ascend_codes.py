"""Checkpoints as msmodelslim writes them, beside the same weights as numbers."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints.coded import LAYERS

DESCRIPTION, WEIGHTS = "quant_model_description.json", "quant_model_weights.safetensors"
STATIC, NARROW = "W8A8", "W4A8_DYNAMIC"
STEP, ZERO = 0.03125, 3  # of activations


def write_ascend(
    folder: Path,
    dense: Path,
    kind: str,
    *,
    half: bool = False,
    group: int = 0,
    version: str = "1.0.0",
    others: str = "",
    linears: re.Pattern[str] = LAYERS,
) -> list[str]:
    """`folder`: the checkpoint `dense` with new layers, as codes of a kind; in `dense` they are numbers then. half: as
    of a checkpoint in float16; group, version: of NARROW; others: the kind of layers of attention; linears: what
    matches the layers' weights. Gives the layers' names."""
    shutil.copytree(dense, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(dense / "model.safetensors")
    stored, layers = dict(tensors), []
    described: dict[str, str | int] = {"model_quant_type": kind, "version": version}
    described |= {"group_size": group} if group else {}
    generator = torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        described[name] = "FLOAT"
        if (found := linears.fullmatch(name)) is None or tensors[name].ndim != 2:
            continue
        layer = found[1]
        layers.append(layer)
        bias = tensors.get(f"{layer}.bias")
        own = others if others and "attn" in layer else kind
        codes, scales = _drawn(tensors[name].shape, generator)
        new = {"weight": codes, "weight_scale": scales, "weight_offset": torch.zeros_like(scales)}
        if own == NARROW:
            tensors[name], new = _narrow(tensors[name].shape, group, version, generator)
        else:
            tensors[name] = codes.float() * scales
        if own == STATIC:
            new = _static(codes, scales[:, 0], bias, half)
            if bias is not None:
                stored.pop(f"{layer}.bias")
                tensors[f"{layer}.bias"] = _bias_of(new)
        stored |= {f"{layer}.{part}": value for part, value in new.items()}
        described |= {f"{layer}.{part}": own for part in new}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    (folder / DESCRIPTION).write_text(json.dumps(described))
    return layers


def _drawn(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return codes, torch.rand((shape[0], 1), generator=generator).add(0.5).div(512)


def _narrow(
    shape: torch.Size, group: int, version: str, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """Numbers, and what is stored of them: two codes in a byte since 1.0.0, a factor for each group."""
    out, groups = shape[0], shape[1] // group if group else 1
    codes = torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    scales = torch.rand((out, 1), generator=generator).add(0.5).div(32)
    seconds = torch.rand((out, groups), generator=generator).add(0.5)
    numbers = codes.double() * scales
    new = {"weight": codes, "weight_scale": scales, "weight_offset": torch.zeros_like(scales)}
    if group:
        numbers *= seconds.double().repeat_interleave(group, 1)
        zeros = torch.zeros_like(seconds)
        new |= {"weight_scale_second": seconds, "weight_offset_second": zeros}
    if version == "1.0.0":
        new["weight"] = (codes[::2] & 15) | (codes[1::2] << 4)
        new["scale_bias"] = (8 * numbers).sum(1, keepdim=True).float()
    return numbers.float(), new


def _static(codes: Tensor, scales: Tensor, bias: Tensor | None, half: bool) -> dict[str, Tensor]:
    """With one step for all activations."""
    step, zero = torch.tensor([STEP]), torch.tensor([float(ZERO)])
    steps = step * scales
    own = torch.zeros(len(codes)) if bias is None else bias.float()
    whole = own.double() / steps - ZERO * codes.sum(1, dtype=torch.int64)
    return {
        "weight": codes,
        "input_scale": step,
        "input_offset": zero,
        "deq_scale": steps.view(torch.int32).long() if half else steps,
        "quant_bias": whole.round().to(torch.int32),
    }


def _bias_of(new: dict[str, Tensor]) -> Tensor:
    """What is left of a bias as whole steps."""
    steps = new["deq_scale"]
    steps = steps.int().view(torch.float32) if steps.dtype == torch.int64 else steps
    whole = new["quant_bias"] + ZERO * new["weight"].sum(1, dtype=torch.int64)
    return (whole.double() * steps).float()
