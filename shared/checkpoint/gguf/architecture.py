"""A model in one GGUF file: its tensors by the names that transformers has for them, and its config.json.

Source: `gguf.constants` of the library `gguf`, and llama.cpp's `conversion` for what it changes in tensors.
transformers reads some of these keys too (`integrations/ggml.py`), but leaves out how positions are scaled, so
config.json is made here. What one architecture has is in `families`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.checkpoint.gguf.families import ARCHITECTURES
from shared.checkpoint.gguf.families.family import OTHER_MODELS, Described, Part
from shared.checkpoint.gguf.header import GgufHeader, GgufTensor, read_header
from shared.checkpoint.gguf.keys import Keys, token_ids
from shared.checkpoint.gguf.positions import FACTORS, rope_parameters
from shared.text.cutting import cut

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_WHOLE = re.compile(r"(\w+)\.(weight|bias)")
_MOST_DIGITS = 9
_MOST_EXPERTS = 1 << 10
_TABLE = "token_embd"
_HEAD = "output.weight"
# What files of towers and projectors say.
_PROJECTORS = ("clip", "mmproj")


@dataclass(frozen=True)
class Placed:
    """A stored tensor, or some of its rows, in the place of one of transformers'. `heads`: into how many its rows fall
    that lie in the order of ggml's rotation; `together`: heads of queries, of keys, and a head's elements, of rows that
    transformers has in another order; `shift` as of `Part`."""

    tensor: GgufTensor
    heads: int = 0
    together: tuple[int, int, int] | None = None
    shift: float = 0.0


class GgufModel:
    """A model in one file. Every method raises InvalidRequest, naming key or tensor, for what no such model has."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        if (parts := header.metadata.get("split.count")) not in (None, 0, 1):
            raise header.refusal(
                f"split.count is {parts}: it is one of several files; make one of them, llama-gguf-split --merge"
                " FIRST-OF-THEM.gguf WHOLE.gguf, and give that"
            )
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            shown, known = cut(repr(name), 40), ", ".join(ARCHITECTURES)
            if name in _PROJECTORS:
                raise header.refusal(
                    f"general.architecture is {shown}: it is the vision part of a model (mmproj); give the file of the"
                    " language model, and this one by --mmproj where it does not lie beside it"
                )
            raise header.refusal(
                f"general.architecture is {shown}; {known} are read: serve the checkpoint that it was made of"
            )
        keys = Keys(header, name)
        named = ARCHITECTURES[name]
        self._kind = named.variant(keys) or named
        keys.refuse(*(key for key in OTHER_MODELS if key not in self._kind.known))
        self._described = Described(keys, frozenset(header.tensors), self._vocabulary())
        self.placed = dict(self._place())
        self.tensors = {name: placed.tensor for name, placed in self.placed.items()}

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        size, keys = self._described.size, self._described.keys
        found = {
            "architectures": [self._kind.name],
            "model_type": self._kind.model_type,
            "vocab_size": size("t"),
            "hidden_size": size("h"),
            "num_hidden_layers": keys.layers(),
            "num_attention_heads": size("n"),
            "num_key_value_heads": size("g"),
            "head_dim": size("d"),
            "max_position_embeddings": keys.whole("context_length"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": _HEAD not in self.header.tensors,
        }
        found |= self._kind.config(self._described) | token_ids(self.header.metadata)
        return found

    def end_ids(self) -> list[int]:
        """Of the tokens that end an answer."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        found = (self.header.metadata.get(key) for key in keys)
        return sorted({index for index in found if type(index) is int})

    def require_tensors(self) -> None:
        """Raises for a tensor that is missing."""
        layers = range(self._described.keys.layers())
        for name, part in self._kind.whole.items():
            self._require(name, name, part)
        for layer in layers:
            for name, part in self._kind.layer.items():
                self._require(f"blk.{layer}.{name}", name, part)

    def _require(self, stored: str, name: str, part: Part) -> None:
        there = self.header.tensors
        if part.optional and f"{stored}.weight" not in there:
            return
        own = f"{stored}.weight"
        if part.instead and stored.removesuffix(name) + f"{part.instead}.weight" in there:
            return
        sizes = [self._described.size(size) for size in part.sizes]
        if own not in there:
            raise self.header.refusal(f"it lacks {own} {sizes}")
        if part.bias and f"{stored}.bias" not in there:
            raise self.header.refusal(f"it lacks {stored}.bias {sizes[:1]}")

    def _place(self) -> Iterator[tuple[str, Placed]]:
        layers = self._described.keys.layers()
        for stored, tensor in self.header.tensors.items():
            if stored in FACTORS:
                continue
            part, prefix, end = self._part(stored)
            if part is None or (end == "bias" and part.bias is False):
                raise self.header.refusal(
                    f"the tensor {cut(stored, 80)} has no place in a model of the architecture"
                    f" {self._described.keys.architecture}"
                )
            if prefix and int(prefix[:-1].rpartition(".")[2]) >= layers:
                raise self.header.refusal(
                    f"the model has no place for the tensor {cut(stored, 80)}"
                )
            yield from self._placed(tensor, part, prefix, end)

    def _part(self, stored: str) -> tuple[Part | None, str, str]:
        """What a tensor is, what its names in transformers begin with, and whether it is a weight or a bias."""
        if (found := _BLOCK.fullmatch(stored)) and len(found[1]) <= _MOST_DIGITS:
            prefix = f"{self._kind.prefix}{int(found[1])}."
            return self._kind.layer.get(found[2]), prefix, found[3]
        if found := _WHOLE.fullmatch(stored):
            return self._kind.whole.get(found[1]), "", found[2]
        return None, "", ""

    def _placed(
        self, tensor: GgufTensor, part: Part, prefix: str, end: str
    ) -> Iterator[tuple[str, Placed]]:
        sizes = part.sizes if end == "weight" else _of_bias(part.sizes)
        shape = tuple(self._described.size(size) for size in sizes)
        # Files leave sides of one element away.
        if [size for size in tensor.shape if size > 1] != [size for size in shape if size > 1]:
            raise self.header.refusal(
                f"the tensor {tensor.name} is {list(tensor.shape)}, and by its keys {list(shape)}"
            )
        names = (part.names,) if isinstance(part.names, str) else part.names
        rows = [self._described.size(row) for row in part.rows] or [shape[0]]
        whole = replace(tensor, shape=shape)
        if "{}" in names[0]:
            if shape[0] > _MOST_EXPERTS:
                raise self.header.refusal(f"the tensor {tensor.name} has {shape[0]:,} experts")
            for number in range(shape[0]):
                one = _rows(whole, number, 1)
                yield from self._named(
                    replace(one, shape=shape[1:]), part, rows, prefix, number, end
                )
            return
        yield from self._named(whole, part, rows, prefix, 0, end)

    def _named(
        self, tensor: GgufTensor, part: Part, rows: list[int], prefix: str, number: int, end: str
    ) -> Iterator[tuple[str, Placed]]:
        names = (part.names,) if isinstance(part.names, str) else part.names
        size, first = self._described.size, 0
        rows = rows if part.rows else [tensor.shape[0]]
        for index, (name, count) in enumerate(zip(names, rows, strict=True)):
            heads = part.heads[index] if part.heads else ""
            yield (
                f"{prefix}{name.format(number)}.{end}",
                Placed(
                    _rows(tensor, first, count),
                    heads=size(heads) if heads else 0,
                    together=(size("n"), size("g"), size("d")) if part.together else None,
                    shift=part.shift if end == "weight" else 0.0,
                ),
            )
            first += count

    def _vocabulary(self) -> int:
        table = self.header.tensors.get(f"{_TABLE}.weight")
        if table is None or len(table.shape) != 2:
            raise self.header.refusal(f"it lacks {_TABLE}.weight, a matrix")
        return table.shape[0]

    def _rope(self) -> dict[str, Any]:
        keys, size = self._described.keys, self._described.size("d")
        if (other := keys.whole("attention.value_length", size)) != size:
            raise self._other_size("attention.value_length", other, size)
        rotated = keys.whole("rope.dimension_count", size)
        if rotated == size:
            return rope_parameters(keys, size)
        if not self._kind.rotates_part or rotated > size or rotated % 2:
            raise self._other_size("rope.dimension_count", rotated, size)
        return rope_parameters(keys, rotated) | {"partial_rotary_factor": rotated / size}

    def _other_size(self, key: str, other: int, size: int) -> Exception:
        return self.header.refusal(
            f"{self._described.keys.full(key)} is {other}, and heads have {size} elements: that is not supported"
        )


def stored_name(path: Path, name: str) -> str:
    """As the file calls a tensor, by its name in transformers."""
    return GgufModel(read_header(path)).tensors[name].name


def _of_bias(sizes: tuple[str, ...]) -> tuple[str, ...]:
    """Of a matrix one number for each output, of several all of these."""
    return sizes[:-1] if len(sizes) > 1 else sizes


def _rows(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Some of a tensor's rows, which lie behind each other."""
    if count == tensor.shape[0]:
        return tensor
    each = tensor.nbytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(count, *tensor.shape[1:]),
        begin=tensor.begin + first * each,
        nbytes=count * each,
    )
