"""A tower's tensors in a checkpoint, by the names by which it takes them."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from shared.checkpoint.folder import Checkpoint
from shared.model_config.quantization import read_encoder_codes
from shared.weights.layouts.stored_layers import LAYOUTS, StoredLayers, is_unused
from shared.weights.named_weights import NamedWeights


def renamed(
    checkpoint: Checkpoint, parts: Sequence[tuple[re.Pattern[str], str]]
) -> Iterator[tuple[str, str]]:
    """Names in a checkpoint and in a tower, as `tower_weights` takes them: of each tensor whose whole name a pattern
    matches that pattern's prefix and its first group."""
    for name in checkpoint.names():
        for pattern, prefix in parts:
            match = pattern.fullmatch(name)
            if match:
                yield name, prefix + match[1]


def of_layers_from(first: int, layer: re.Pattern[str]) -> Callable[[str], bool]:
    """Tells the tensors of layer `first` and those behind it, by their names: `layer` matches how these begin, its
    first group is the layer's number."""

    def tells(name: str) -> bool:
        found = layer.match(name)
        return bool(found and int(found[1]) >= first)

    return tells


def linear_sizes(checkpoint: Checkpoint, layer: str) -> tuple[int, ...]:
    """Outputs and inputs of a linear layer, stored as numbers or codes, by its name in the checkpoint. Raises
    InvalidRequest for codes that are not stored as config.json says, NotFound where there is no such layer."""
    if (codes := read_encoder_codes(checkpoint)) is not None:
        own = {name: name for name in checkpoint.names() if name.startswith(f"{layer}.")}
        stored = StoredLayers(checkpoint, LAYOUTS[codes.layout](codes), own)
        if layer in stored:
            return stored.sizes(layer)
    return checkpoint.shape(f"{layer}.weight")


def tower_weights(
    checkpoint: Checkpoint,
    names: Iterable[tuple[str, str]],
    unused: Callable[[str], bool] = lambda name: False,
) -> NamedWeights:
    """What a tower takes its tensors from. `names` are (name in the checkpoint, name in the tower);
    `unused(name in the tower)` tells which are left alone. `finish` refuses the others that the tower has not taken.
    Linear layers that are stored as codes are given as the numbers that these stand for."""
    codes = read_encoder_codes(checkpoint)
    taken = {
        inner: outer
        for outer, inner in names
        if not unused(inner) and not (codes and is_unused(codes, inner))
    }
    return NamedWeights(checkpoint, taken, codes, keeps_codes=False)
