"""A drawn adapter for every linear layer of a checkpoint's decoder, and the checkpoint with it merged into its
weights."""

import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.decoder.devices.base.adapters import LayerAdditions
from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.adapters import Adapter, pack_addition
from services.decoder.models.llama import Llama
from services.decoder.steps.step import Step
from shared.model_config.decoder import DecoderConfig
from shared.weights.linear_weight import in_memory

_LINEAR = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj)\.weight")


@dataclass(frozen=True)
class Matrices:
    """Of one stored linear layer: down [rank, inputs], up [outputs, rank], a scale included."""

    layer: int
    name: str
    stored: str
    down: Tensor
    up: Tensor


def draw_lora(
    folder: Path,
    canonical: Callable[[str], str],
    seed: int,
    names: Collection[str] | None = None,
    rank: int = 3,
) -> list[Matrices]:
    """For the linear layers of these names, or all. canonical: see `Llama.canonical`."""
    numbers, found = torch.Generator().manual_seed(seed), []
    for stored, weight in sorted(load_file(folder / "model.safetensors").items()):
        match = _LINEAR.fullmatch(canonical(stored))
        if match is None or (names is not None and match[2] not in names):
            continue
        out, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=numbers) / inputs**0.5
        up = torch.randn(out, rank, generator=numbers) / 2
        found.append(Matrices(int(match[1]), match[2], stored, down, up))
    return found


def merge(folder: Path, target: Path, *loras: Sequence[Matrices]) -> Path:
    """A copy of the checkpoint whose weights have what the adapters add."""
    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    for matrices in (one for lora in loras for one in lora):
        weights[matrices.stored] = weights[matrices.stored] + matrices.up @ matrices.down
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def pack(lora: Sequence[Matrices], config: DecoderConfig, ops: BaseOps) -> Adapter:
    """As a device's ops take it, of several ranks this one's share."""
    return Adapter(
        [
            LayerAdditions.of(
                pack_addition(one.name, in_memory(one.down), in_memory(one.up), config, ops)
                for one in lora
                if one.layer == i
            )
            for i in range(config.num_layers)
        ]
    )


# Which adapters the tokens [T] of a step have: adapters, each with the places of its tokens.
Choose = Callable[[Step], Sequence[tuple[Adapter, Tensor]]]


def adapt(model: Llama, choose: Choose) -> Llama:
    """The model, with what is chosen for each step from now on."""
    setattr(model, "adapted_rows", choose)  # noqa: B010
    return model


def tokens_of_slots(step: Step, slots: Collection[int]) -> Tensor:
    """int64 [n]: the tokens of the rows of these slots."""
    ends = step.meta.cu_q
    rows = zip(step.slots, ends, ends[1:], strict=False)
    tokens = [token for slot, first, end in rows if slot in slots for token in range(first, end)]
    return torch.tensor(tokens, dtype=torch.int64).to(step.ids.device)
