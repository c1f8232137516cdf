"""What all layouts of coded layers are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shared.model_config.quantization import StoredCodes

Shape = tuple[int, ...]
WORDS = ("I32",)
SCALES = ("F16", "BF16", "F32")
INDEX = ("I32", "I64")
# Inputs of a group that others are divided into, or filled up to a multiple of, where a cut needs that.
LEAST_GROUP = 16
NOT_FINITE = "it has an element that is no number, or infinite"


class BadCodes(ValueError):
    """Stored tensors that make no weight: `tensor`, the last part of its name, and why."""

    def __init__(self, tensor: str, why: str) -> None:
        super().__init__(why)
        self.tensor = tensor


@dataclass(frozen=True)
class Stored:
    """What a tensor has to be: one of some element types, as safetensors spells them, in a shape, or in another."""

    dtypes: tuple[str, ...]
    shape: Shape
    other: Shape | None = None


# The content of a small tensor of a layer that has bytes, by the last part of its name; None where it is not stored.
Beside = Callable[[str], "bytes | None"]


class Layout(ABC):
    """One way in which a layer [out, inputs] is stored."""

    main: ClassVar[str]  # the tensor of codes
    tensors: ClassVar[tuple[str, ...]]  # all that a layer may have beside its bias
    unused: ClassVar[tuple[str, ...]] = ()  # those that may be there and are not read
    main_dtypes: ClassVar[tuple[str, ...]] = WORDS
    scales: ClassVar[str] = "weight_scale"  # the tensor of scales
    main_is_flat: ClassVar[bool] = False  # its shape is not the layer's, which lies beside it
    order: ClassVar[str] = ""  # the tensor that says which group each input belongs to

    def __init__(self, codes: StoredCodes) -> None:
        self.codes = codes

    @classmethod
    def split(cls, name: str) -> tuple[str, str]:
        """The layer that a tensor would be of, and what it is there."""
        layer, _, tensor = name.rpartition(".")
        return layer, tensor

    def of_layer(self, main: str, beside: Beside) -> "Layout":
        """That of one layer, by the stored name of its codes and what lies beside these, where a checkpoint stores some
        in another way. Raises BadCodes."""
        return self

    def of_shapes(self, shapes: Mapping[str, Shape], said: Sequence[int]) -> "Layout":
        """That of a layer of a checkpoint in which each has bits and groups of its own: by the shapes of its tensors
        and `said`, the content of `weight_shape`. Raises BadCodes."""
        raise NotImplementedError

    def with_own(self, bits: int, inputs: int, groups: int, symmetric: bool) -> "Layout":
        """For `of_shapes`. Raises BadCodes."""
        if groups < 1 or inputs < 1 or inputs % groups:
            raise BadCodes(self.scales, f"{inputs} inputs do not divide into {groups} groups")
        group = 0 if groups == 1 else inputs // groups
        own = replace(self.codes, bits=bits, group=group, symmetric=symmetric, mixed=False)
        return type(self)(own)

    @abstractmethod
    def sizes(self, main: Shape) -> tuple[int, int]:
        """Outputs and inputs of a layer, by the shape of its codes; where they are filled up, so many at most."""

    @abstractmethod
    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """What must be there of a layer. Raises BadCodes where none can be of these sizes."""

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """What may be there, and is read then."""
        return {}

    def middle_word(self) -> "tuple[str, int] | None":
        """The tensor of zero points and what each of its words of 32 bits must be, where the configuration says that
        zeros are in the middle and the tensor is there nevertheless."""
        return None

    def groups(self, inputs: int) -> int:
        """Groups of inputs with one scale. Raises BadCodes where the last would be a smaller one."""
        group = self.codes.group
        if group and inputs % group:
            raise BadCodes(
                self.main, f"its {inputs} inputs do not divide into groups of {group} (group_size)"
            )
        return inputs // group if group else 1

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 for all of an output's."""
        return self.codes.group

    @property
    def per_word(self) -> int:
        """Codes of a word."""
        return 32 // self.codes.bits
