"""A small random model of a checkpoint's configuration, and the folder that it is saved to."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from services.comparison.small_config import smaller
from services.families.verdicts import WEIGHTS
from shared.checkpoint.folder import QUANTIZATION_KEYS, Checkpoint
from shared.model_config import ascend_codes

_MOST_PARAMETERS = 700_000_000  # 2.8 GB
# Each is tried where the class does not take the one before.
_ATTEMPTS = (
    {"widths": True, "layers": True},
    {"widths": True, "layers": False},
    {"widths": False, "layers": True},
    {"widths": False, "layers": False},
)
_NO_MEMORY = "can't allocate memory"  # torch's


def raise_if_passing(error: Exception) -> None:
    """Raises an error that says nothing of the model, and may be gone the next time."""
    if isinstance(error, MemoryError | OSError) or _NO_MEMORY in str(error):
        raise error


class CannotBeMade(Exception):
    """No small model of this configuration can be made; says why."""


def small_models(kind: type[Any], config: Any) -> Iterator[Any]:
    """Models of the class, random, in float32 and its own eager attention, the smallest first: those that the class can
    be made with. Raises CannotBeMade at the end."""
    reasons = []
    for attempt in _ATTEMPTS:
        try:
            found = smaller(config, **attempt)
            with torch.device("meta"):
                empty = kind._from_config(found)
            count = sum(parameter.numel() for parameter in empty.parameters())
            if count > _MOST_PARAMETERS:
                reasons.append(f"a model with {count:,} parameters is too large")
                continue
            eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
            model = kind._from_config(found, dtype=torch.float32, **eager)
        except Exception as error:  # whatever a class says of sizes that do not fit each other
            raise_if_passing(error)
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        _randomise(model)
        yield model.eval().requires_grad_(False)
    raise CannotBeMade(reasons[0] if reasons else "its code fails in every size")


def save(model: Any, checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Weights, the checkpoint's configuration with the sizes of the model, and its other files."""
    model.save_pretrained(folder)
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for file in checkpoint.folder.iterdir():
        if file.is_file() and not file.name.endswith((*WEIGHTS, ".index.json")):
            shutil.copy(file, folder)
    for file in folder.glob(ascend_codes.PATTERN):
        file.unlink()
    before = transformers.AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    changed = _changes(before.to_dict(), model.config.to_dict())
    written = _overlaid(_unquantized(checkpoint.config), changed)
    target = folder / "config.json"
    target.write_text(json.dumps(written), encoding="utf-8")
    read = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if _changes(read.to_dict(), model.config.to_dict()):  # other spellings of the same keys
        target.write_text(json.dumps(sizes), encoding="utf-8")
    return Checkpoint(folder, checkpoint.family)


def _randomise(model: nn.Module) -> None:
    """Each layer's results as large as its inputs, so that every part is seen in the end."""
    generator = torch.Generator().manual_seed(0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.numel() == 1:  # a gate, which is closed at first
                parameter.add_(noise)
                continue
            if parameter.ndim < 2:
                parameter.add_(noise * 0.05)
                continue
            fan = parameter.shape[-1] if parameter.ndim < 4 else math.prod(parameter.shape[1:])
            scale = 0.5 if id(parameter) in tables else fan**-0.5
            parameter.copy_(noise * scale)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What is other in `after`; inside of parts too."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := _changes(old, value):
                found[name] = inner
        elif value != old and name not in _PROCESS:
            found[name] = value
    return found


# Keys that say how a model was made, and nothing of it.
_PROCESS = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what parts say of quantized weights: the model's are numbers."""
    return {
        name: _unquantized(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in QUANTIZATION_KEYS
    }


def _overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in changes.items():
        old = found.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            value = _overlaid(old, value)
        found[name] = value
    return found
