"""What each layer of a decoder keeps of its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from services.decoder.devices.base.attention_meta import KVSpec
from shared.errors import InvalidRequest


@dataclass(frozen=True)
class Paged(KVSpec):
    """Keys and values of every token, in blocks. The layer attends to `window` tokens, the query included, or to the
    chunk of `chunk` tokens that the query is in; None is all."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Shared:
    """Nothing of its own: it reads what layer number `layer` keeps."""

    layer: int


@dataclass(frozen=True)
class State:
    """`nbytes` bytes for each sequence, whatever its length (recurrent layers)."""

    nbytes: int


@dataclass(frozen=True)
class Opaque:
    """A cache that only the layer itself understands."""


LayerSpec: TypeAlias = Paged | Shared | State | Opaque


def paged_layers(layers: Sequence[LayerSpec]) -> list[Paged]:
    """The layers of a model that keeps everything in blocks. Raises InvalidRequest naming the first that does not."""
    found = []
    for number, layer in enumerate(layers):
        if not isinstance(layer, Paged):
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"layer {number} keeps {layer}: only layers whose whole cache is in blocks are served",
                field="model",
            )
        found.append(layer)
    return found
