"""Low-rank additions to the linear layers of a decoder layer (LoRA: Hu et al., 2021), as the ops see them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.decoder.steps.attention_meta import Heads, Packed
from shared.errors import InvalidRequest
from shared.weights.linear_weight import LinearWeight

# The products of a `DecoderLayer`, each made of one linear layer or of several that have the same inputs.
Product = Literal["qkv", "output", "gate_up", "down"]


@dataclass(frozen=True)
class LinearPlace:
    """Where a linear layer is: outputs [first, last) of a product."""

    name: str
    product: Product
    first: int
    last: int
    inputs: int
    gates: int = 0  # of the product's outputs these first ones gate the others

    def part(self, first: int, last: int) -> "LinearPlace":
        """Some of its outputs, [first, last). Raises InvalidRequest for others than it has."""
        count = self.last - self.first
        if not 0 <= first < last <= count:
            raise _refused(f"outputs {first} to {last} of {self.name}, which has {count}")
        return LinearPlace(
            self.name,
            self.product,
            self.first + first,
            self.first + last,
            self.inputs,
            self.gates,
        )

    def require(self, down: LinearWeight, up: LinearWeight) -> None:
        """Raises InvalidRequest unless up(down(x)) is an addition to these outputs."""
        if down.bias is not None or up.bias is not None:
            raise _refused(f"{self.name}: {down.name} or {up.name} has a bias")
        outputs = self.last - self.first
        if (down.inputs, up.out, up.inputs) == (self.inputs, outputs, down.out):
            return
        raise _refused(
            f"{self.name} takes {self.inputs} inputs to {outputs} outputs; {down.name} is [{down.out}, {down.inputs}]"
            f" and {up.name} [{up.out}, {up.inputs}], not [rank, {self.inputs}] and [{outputs}, rank]"
        )


@dataclass(frozen=True)
class LayerLinears:
    """The linear layers of a decoder layer by their names in checkpoints."""

    hidden: int
    inner: int  # between the layers of the MLP
    heads: Heads

    def place(self, name: str) -> LinearPlace:
        """Of `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`, and of `qkv_proj` and
        `gate_up_proj`, in which some of them are stored as one. Raises InvalidRequest for another name."""
        size, hidden, inner = self.heads.size, self.hidden, self.inner
        queries, keys = self.heads.num_q * size, self.heads.num_kv * size
        both, all_three = queries + keys, queries + 2 * keys
        places: dict[str, tuple[Product, int, int, int]] = {
            "q_proj": ("qkv", 0, queries, hidden),
            "k_proj": ("qkv", queries, both, hidden),
            "v_proj": ("qkv", both, all_three, hidden),
            "qkv_proj": ("qkv", 0, all_three, hidden),
            "o_proj": ("output", 0, hidden, queries),
            "gate_proj": ("gate_up", 0, inner, hidden),
            "up_proj": ("gate_up", inner, 2 * inner, hidden),
            "gate_up_proj": ("gate_up", 0, 2 * inner, hidden),
            "down_proj": ("down", 0, hidden, inner),
        }
        if name not in places:
            raise _refused(f"no linear layer {name} in a decoder layer: it has {', '.join(places)}")
        gates = inner if places[name][0] == "gate_up" else 0
        return LinearPlace(name, *places[name], gates)


@dataclass(frozen=True)
class Addition:
    """What is added to the outputs at `place`: up(down(x)), any scale a part of `up`; see `BaseOps.pack_addition`."""

    place: LinearPlace
    down: Packed  # [rank, inputs]
    up: Packed  # [outputs, rank]


@dataclass(frozen=True)
class Segment:
    """Rows of a step that have an addition."""

    rows: Tensor  # int64 [n], ascending, each once
    addition: Addition


@dataclass(frozen=True, eq=False)
class LayerAdditions:
    """What one adapter adds to each product of a decoder layer."""

    qkv: Sequence[Addition] = ()
    output: Sequence[Addition] = ()
    gate_up: Sequence[Addition] = ()
    down: Sequence[Addition] = ()

    @classmethod
    def of(cls, additions: Iterable[Addition]) -> "LayerAdditions":
        """Each by its place."""
        found: dict[str, list[Addition]] = {}
        for addition in additions:
            found.setdefault(addition.place.product, []).append(addition)
        return cls(**found)


@dataclass(frozen=True, eq=False)
class LayerSegments:
    """What each of several adapters adds in one decoder layer to its rows [n] of a step. Several may have a row in
    common: then it gets the additions of one after those of the other, in this order. A row's bits depend on nothing
    else as long as those that it has come in the same order."""

    rows: Sequence[Tensor]
    additions: Sequence[LayerAdditions]

    def of(self, product: Product) -> Sequence[Segment]:
        """To one product."""
        return [
            Segment(rows, addition)
            for rows, additions in zip(self.rows, self.additions, strict=True)
            for addition in getattr(additions, product)
        ]


def require_rows(rows: Tensor) -> None:
    """Raises ValueError for what cannot be the rows of a segment; of rows in a device's memory only their form is
    looked at, because to read them is to wait for it."""
    if rows.dtype != torch.int64 or rows.ndim != 1:
        raise ValueError(f"rows of a segment are int64 [n], not {rows.dtype} {list(rows.shape)}")
    if rows.device.type != "cpu" or not len(rows):
        return
    if int(rows[0]) < 0 or not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError("rows of a segment are ascending, each once")


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest("BAD_ADAPTER", f"the adapter does not fit the model: {what}")
