"""What the readers of all layouts are, and how words of 32 bits hold codes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shared.model_config.quantization import StoredCodes
from shared.weights.quantized_weight import QuantizedWeight

Shape = tuple[int, ...]
WORDS = ("I32",)
SCALES = ("F16", "BF16", "F32")
ALL = slice(None)


class BadCodes(ValueError):
    """Stored tensors that make no weight: `tensor`, the last part of its name, and why."""

    def __init__(self, tensor: str, why: str) -> None:
        super().__init__(why)
        self.tensor = tensor


@dataclass(frozen=True)
class Stored:
    """What a tensor has to be: one of some element types, as safetensors spells them, in a shape."""

    dtypes: tuple[str, ...]
    shape: Shape


class Tensors(Protocol):
    """Those of one layer, by the last parts of their names: mapped, not to be written to."""

    def has(self, tensor: str) -> bool:
        """Whether it is stored."""

    def whole(self, tensor: str) -> Tensor:
        """All of it."""

    def part(self, tensor: str, rows: slice, columns: slice) -> Tensor:
        """Some rows and columns of a matrix; nothing else is read."""


class Layout(ABC):
    """One way in which a layer [out, inputs] is stored."""

    main: ClassVar[str]  # the tensor of codes
    tensors: ClassVar[tuple[str, ...]]  # all that a layer may have beside its bias
    unused: ClassVar[tuple[str, ...]] = ()  # those that may be there and are not read
    main_dtypes: ClassVar[tuple[str, ...]] = WORDS

    def __init__(self, codes: StoredCodes) -> None:
        self.codes = codes

    @abstractmethod
    def sizes(self, main: Shape) -> tuple[int, int]:
        """Outputs and inputs of a layer, by the shape of its codes; where they are filled up, so many at most."""

    @abstractmethod
    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """What must be there of a layer. Raises BadCodes where none can be of these sizes."""

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """What may be there, and is read then."""
        return {}

    @abstractmethod
    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """Outputs `rows`, which has a begin and an end. Raises BadCodes."""

    def groups(self, inputs: int) -> int:
        """Groups of inputs with one scale. Raises BadCodes where the last would be a smaller one."""
        group = self.codes.group
        if group and inputs % group:
            raise BadCodes(
                self.main, f"its {inputs} inputs do not divide into groups of {group} (group_size)"
            )
        return inputs // group if group else 1

    @property
    def per_word(self) -> int:
        """Codes of a word."""
        return 32 // self.codes.bits

    def packed_outputs(self, tensors: Tensors, name: str, rows: slice) -> Tensor:
        """uint8 [n, outputs]: one code a byte, of a tensor of words [n, out / `per_word`], the first in the lowest
        bits."""
        each = self.per_word
        first = rows.start // each
        words = tensors.part(name, ALL, slice(first, -(-rows.stop // each)))
        codes = apart(as_bytes(words), self.codes.bits)
        return codes[:, rows.start - first * each : rows.stop - first * each]


def as_bytes(words: Tensor) -> Tensor:
    """uint8 [n, 4 * m] of int32 [n, m], the lowest byte of each first."""
    return words.contiguous().view(torch.uint8)


def apart(codes: Tensor, bits: int) -> Tensor:
    """One code a byte, of bytes whose lower half comes first."""
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def together(codes: Tensor, bits: int) -> Tensor:
    """The reverse of `apart`."""
    return codes.contiguous() if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def whole_order(tensor: str, of_inputs: Tensor, group: int, count: int) -> Tensor | None:
    """int64 [inputs]: the inputs by the groups that they belong to; None where they lie so. Raises BadCodes unless each
    of the `count` groups has its `group` of inputs."""
    inputs = len(of_inputs)
    found = of_inputs.long()
    expected = torch.arange(inputs) // (group or max(1, inputs))
    if torch.equal(found, expected):
        return None
    order = torch.argsort(found, stable=True)
    if not torch.equal(found[order], expected):
        raise BadCodes(tensor, f"its {count} groups have not {group or inputs} inputs each")
    return order
