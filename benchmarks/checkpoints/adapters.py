"""Drawn LoRA adapters for all linear layers of a checkpoint's decoder, as PEFT would save them."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.lora.adapter import WEIGHTS
from shared.lora.config import CONFIG

_LINEAR = re.compile(r".*layers\.\d+\.(?:self_attn|mlp)\.\w+_proj")
_VISION = re.compile(r"vis(ion|ual)")


def draw_adapters(model: Path, folder: Path, count: int, rank: int) -> list[str]:
    """Writes them into new folders below `folder`; `name=folder` of each. Raises InvalidRequest for a checkpoint
    without linear layers of the usual names."""
    checkpoint = Checkpoint(model)
    names = [name.removesuffix(".weight") for name in checkpoint.names()]
    modules = [m for m in names if _LINEAR.fullmatch(m) and not _VISION.search(m)]
    if not modules:
        raise InvalidRequest("NO_LINEARS", f"{model} has no layers.0.self_attn.q_proj or the like")
    return [
        f"drawn-{number}={_draw(checkpoint, modules, folder / str(number), number, rank)}"
        for number in range(1, count + 1)
    ]


def _draw(checkpoint: Checkpoint, modules: list[str], target: Path, seed: int, rank: int) -> Path:
    numbers, tensors = torch.Generator().manual_seed(seed), {}
    for module in modules:
        outputs, inputs = checkpoint.shape(f"{module}.weight")
        prefix = f"base_model.model.{module}"
        down = torch.randn(rank, inputs, generator=numbers) / inputs**0.5
        tensors[f"{prefix}.lora_A.weight"] = down
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=numbers) / 100
    target.mkdir(parents=True)
    save_file(tensors, target / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (target / CONFIG).write_text(json.dumps(config))
    return target
