"""Loads a module's weights by name from a checkpoint: all of them, and nothing else."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from services.vision_encoder.devices.base.device import Device
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.errors import InvalidRequest


def renamed(
    checkpoint: Checkpoint, parts: Sequence[tuple[re.Pattern[str], str]]
) -> Iterator[tuple[str, str]]:
    """Names in a checkpoint and in a module, as `load` takes them: of each tensor whose whole name a pattern matches
    that pattern's prefix and its first group."""
    for name in checkpoint.names():
        for pattern, prefix in parts:
            match = pattern.fullmatch(name)
            if match:
                yield name, prefix + match[1]


def load(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: Iterable[tuple[str, str]],
    device: Device,
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fills `module`, which was built on the meta device, and puts it on a device in its element type.

    `names` are (name in the checkpoint, name in the module); `unused(name in the module)` tells which may be left
    out.
    Raises InvalidRequest naming every tensor that is missing, unknown or of another shape.
    """
    wanted = dict(module.named_parameters())
    given = {inner: outer for outer, inner in names if not unused(inner)}
    missing = sorted(wanted.keys() - given.keys())
    unknown = sorted(given[name] for name in given.keys() - wanted.keys())
    if missing or unknown:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{checkpoint.folder}: vision tensors missing: {missing or 'none'},"
            f" not understood: {unknown or 'none'}",
        )
    state = {}
    reader = WeightReader(checkpoint, given.values())
    for inner, outer in given.items():
        tensor = reader.tensor(outer)
        if tensor.shape != wanted[inner].shape:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{checkpoint.folder}: {outer} is {list(tensor.shape)},"
                f" config.json asks for {list(wanted[inner].shape)}",
            )
        # A copy of its own: the mapped file may go away, and its pages would be read at the first
        # image.
        state[inner] = tensor.to(device.where, device.dtype, copy=True)
    module.load_state_dict(state, strict=False, assign=True)
    reader.finish()
    module.eval().requires_grad_(False)
