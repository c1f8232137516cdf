"""Which tensors of a file each tensor of a vision part is made of."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shared.checkpoint.gguf.block_types import CODED
from shared.checkpoint.gguf.header import GgufHeader, GgufTensor
from shared.text.cutting import cut

Joined = Literal["rows", "moments"]


@dataclass(frozen=True)
class VisionTensor:
    """A tensor as transformers has it. `parts` follow each other in its rows, or are a convolution's moments, which
    are its third dimension; one part is the tensor."""

    shape: tuple[int, ...]
    parts: tuple[GgufTensor, ...]
    joined: Joined = "rows"

    @property
    def dtype(self) -> str:
        """As safetensors spells it, of what is given: parts of several types, and codes, become float32."""
        kinds = {part.kind.name for part in self.parts}
        return kinds.pop() if len(kinds) == 1 and not kinds & CODED.keys() else "F32"


@dataclass(frozen=True)
class Expected:
    """`stored`: the names of its parts in the file, which share the rows equally."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    joined: Joined = "rows"

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of each part."""
        if self.joined == "moments":
            return (*self.shape[:2], *self.shape[3:])
        return (self.shape[0] // len(self.stored), *self.shape[1:])


def find_tensors(
    header: GgufHeader, expected: Iterable[Expected], unused: frozenset[str] = frozenset()
) -> dict[str, VisionTensor]:
    """By the names of transformers. Raises InvalidRequest, naming the tensor, for one that is missing, has another
    shape, or has no place among the expected ones and is not `unused`."""
    found, taken = {}, set(unused)
    for one in expected:
        parts = tuple(_part(header, name, one.part_shape) for name in one.stored)
        found[one.name] = VisionTensor(one.shape, parts, one.joined)
        taken.update(one.stored)
    for name in header.tensors:
        if name not in taken:
            raise header.refusal(
                f"the tensor {cut(name, 80)} has no place in a vision part of its projector type"
            )
    return found


def with_biases(
    layers: Mapping[str, tuple[str, tuple[int, ...]]], bias: bool = True
) -> Iterator[Expected]:
    """The tensors of layers: by the layer's name in the file its name in transformers and its weight's shape."""
    for stored, (name, shape) in layers.items():
        yield Expected(f"{name}.weight", shape, (f"{stored}.weight",))
        if bias:
            yield Expected(f"{name}.bias", shape[:1], (f"{stored}.bias",))


def matrix(header: GgufHeader, name: str) -> tuple[int, int]:
    """The shape of a matrix by which others are known."""
    stored = header.tensors.get(name)
    if stored is None or len(stored.shape) != 2:
        raise header.refusal(f"it lacks {name}, a matrix")
    return stored.shape[0], stored.shape[1]


def _part(header: GgufHeader, name: str, shape: tuple[int, ...]) -> GgufTensor:
    stored = header.tensors.get(name)
    if stored is None:
        raise header.refusal(f"it lacks {name} {list(shape)}")
    # Converters leave out dimensions of one.
    if _squeezed(stored.shape) != _squeezed(shape):
        raise header.refusal(
            f"the tensor {name} is {list(stored.shape)}, and by its keys {list(shape)}"
        )
    return stored


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
