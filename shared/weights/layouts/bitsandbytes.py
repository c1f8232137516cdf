"""bitsandbytes as transformers saves it: codes of 4 bits ("nf4", "fp4") in blocks, and of 8 bits by output."""

import json
from dataclasses import dataclass
from typing import Any

from shared.weights.layouts.layout import BadCodes, Beside, Layout, Shape, Stored

# Of a tensor of JSON in bytes, by the type that it is called after.
_STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
STATES = tuple(f"{_STATE}{kind}" for kind in KINDS)
_CODES = ("U8",)
_LONGEST_BLOCK = 1 << 16


@dataclass(frozen=True)
class State:
    """What is said of one layer: `kind` of codes, `out` and `inputs`, codes of a block with one scale; where those
    scales are codes too, how many of these share one, and what is added to each."""

    tensor: str
    kind: str
    out: int
    inputs: int
    block: int
    nested_block: int = 0
    offset: float = 0.0

    @property
    def blocks(self) -> int:
        """Of the layer; the last one may be a short one."""
        return -(-self.out * self.inputs // self.block)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether none has codes of two outputs."""
        return self.inputs % self.block == 0


def read_state(beside: Beside) -> State:
    """Raises BadCodes, with the tensor's name, where it is missing or says what is not read."""
    tensor, stored = next(
        ((name, content) for name in STATES if (content := beside(name)) is not None), ("", b"")
    )
    if not tensor:
        raise BadCodes(STATES[0], "the checkpoint lacks it")
    try:
        said: Any = json.loads(stored)
        out, inputs = said["shape"]
        nested = said.get("nested_blocksize", 0)
        offset = float(said.get("nested_offset", 0.0))
        found = State(tensor, said["quant_type"], out, inputs, said["blocksize"], nested, offset)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCodes(tensor, f"it does not say how the layer is stored ({error})") from None
    sizes = (found.out, found.inputs, found.block)
    if not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise BadCodes(tensor, f"it says {list(sizes)} outputs, inputs and codes of a block")
    if type(nested) is not int or not 0 <= nested < 1 << 31 or abs(offset) == float("inf"):
        raise BadCodes(tensor, f"it says {nested} scales of a block, and {offset} to be added")
    if found.kind not in KINDS or found.kind != tensor.removeprefix(_STATE) or offset != offset:
        raise BadCodes(tensor, f"it says {found.kind!r} and {offset}")
    if found.block > _LONGEST_BLOCK or found.block % 2:
        raise BadCodes(tensor, f"it says blocks of {found.block} codes")
    return found


class Bnb4Layout(Layout):
    """`weight` uint8 [out * inputs / 2, 1], the even one of two codes in the upper half of a byte; `weight.absmax`
    float32 [blocks], or uint8 with `weight.nested_absmax` float32 [blocks / 256, rounded up] and
    `weight.nested_quant_map` [256]; `weight.quant_map` [16], what codes stand for; and a tensor of JSON: `State`.
    Blocks are cut of all codes, one output behind the other: one may end inside of an output."""

    main = "weight"
    main_is_flat = True
    tensors = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *STATES,
    )
    main_dtypes = _CODES
    scales = "weight.absmax"

    @classmethod
    def split(cls, name: str) -> tuple[str, str]:
        """See `Layout.split`."""
        for tensor in cls.tensors:
            if name.endswith(f".{tensor}"):
                return name.removesuffix(f".{tensor}"), tensor
        return super().split(name)

    def of_layer(self, main: str, beside: Beside) -> Layout:
        """See `Layout.of_layer`."""
        return Bnb4Layer(self, read_state(beside))

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`; `of_layer` knows them."""
        raise NotImplementedError

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`; `of_layer` knows more."""
        return {"weight": Stored(_CODES, (-(-out * inputs // 2), 1))}


class Bnb4Layer(Bnb4Layout):
    """Of one layer."""

    def __init__(self, layout: Layout, state: State) -> None:
        super().__init__(layout.codes)
        self._state = state

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return self._state.out, self._state.inputs

    @property
    def group(self) -> int:
        """See `Layout.group`. 0 where blocks are no groups of inputs: such a layer is read as numbers."""
        return self._state.block if self.has_whole_blocks else 0

    @property
    def has_whole_blocks(self) -> bool:
        """See `State.has_whole_blocks`."""
        return self._state.has_whole_blocks

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        state = self._state
        found = super().required(out, inputs)
        found["weight.quant_map"] = Stored(("F32",), (16,))
        if not state.nested_block:
            return found | {"weight.absmax": Stored(("F32",), (state.blocks,))}
        nested = -(-state.blocks // state.nested_block)
        return found | {
            "weight.absmax": Stored(_CODES, (state.blocks,)),
            "weight.nested_absmax": Stored(("F32",), (nested,)),
            "weight.nested_quant_map": Stored(("F32",), (256,)),
        }


class Bnb8Layout(Layout):
    """`weight` int8 [out, inputs], and `SCB` float32 [out], the largest of each output: what 127 stands for.
    `weight_format` says that rows lie as they are counted."""

    main = "weight"
    tensors = ("weight", "SCB", "weight_format")
    main_dtypes = ("I8",)
    scales = "SCB"

    def of_layer(self, main: str, beside: Beside) -> Layout:
        """See `Layout.of_layer`."""
        said = beside("weight_format")
        if said is not None and said != b"\0":
            raise BadCodes("weight_format", f"it is {list(said)}, and 0 (by rows) is read")
        return self

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        return {"weight": Stored(self.main_dtypes, (out, inputs)), "SCB": Stored(("F32",), (out,))}
