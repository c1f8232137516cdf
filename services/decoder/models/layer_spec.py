"""What each layer of a decoder keeps of its sequences."""

from dataclasses import dataclass
from typing import TypeAlias

from services.decoder.steps.attention_meta import KVSpec
from services.decoder.steps.slot_state import StateTensor


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
    """These tensors for each sequence, whatever its length (convolutions, recurrences)."""

    tensors: tuple[StateTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class EncoderKeys(KVSpec):
    """Keys and values of the rows that an encoder made of a sequence's media, in blocks of their own: written once for
    all sequences with the same media, and read by each token. An item has `item_rows` of them at the most."""

    item_rows: int


@dataclass(frozen=True)
class Opaque:
    """A cache that only the layer itself understands."""


LayerSpec: TypeAlias = Paged | Shared | State | EncoderKeys | Opaque
