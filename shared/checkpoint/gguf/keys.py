"""What the keys of a GGUF file say, each of the type and within the bounds that it has to be."""

import struct
from collections.abc import Mapping
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader, GgufTensor, Texts
from shared.errors import InvalidRequest
from shared.text.cutting import cut

_MOST = 1 << 31
_MOST_LAYERS = 1 << 12


class Keys:
    """The keys of one architecture in one file. Every method raises InvalidRequest, naming the key, for one that is
    missing without a default, and for a value that makes no sense."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header, self.architecture = header, architecture

    def full(self, key: str) -> str:
        """As the file spells a key."""
        return f"{self.architecture}.{key}"

    def value(self, key: str, default: Any = None) -> Any:
        """As it is stored."""
        found = self.header.metadata.get(self.full(key), default)
        if found is None:
            raise self.header.refusal(f"it has no key {self.full(key)}")
        return found

    def has(self, key: str) -> bool:
        """Whether the file has it, be it 0."""
        return self.full(key) in self.header.metadata

    def whole(self, key: str, default: int | None = None) -> int:
        """A number from 1 on; of each layer, where they are all the same."""
        found = self.value(key, default)
        if isinstance(found, tuple) and found and len(set(found)) == 1:
            found = found[0]
        if type(found) is not int or not 0 < found < _MOST:
            raise self.wrong(key, found)
        return found

    def count(self, key: str) -> int:
        """A number from 0 on, which stands for a key that is not there too."""
        found = self.value(key, 0)
        return 0 if type(found) is int and not found else self.whole(key)

    def layers(self) -> int:
        """How many the model has."""
        layers = self.whole("block_count")
        if layers > _MOST_LAYERS:
            raise self.header.refusal(f"{self.full('block_count')} is {layers:,}")
        return layers

    def number(self, key: str, default: float | None = None) -> float:
        """Finite and not below 0."""
        found = self.value(key, default)
        if type(found) not in (int, float) or not 0 <= found < float("inf"):
            raise self.wrong(key, found)
        return float(found)

    def positive(self, key: str, default: float | None = None) -> float:
        """A `number` that is not 0."""
        found = self.number(key, default)
        if not found:
            raise self.wrong(key, found)
        return found

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        found = self.value(key, default)
        if type(found) is not bool:
            raise self.wrong(key, found)
        return found

    def windows(self, period: int) -> list[str]:
        """`layer_types` of transformers. period: of every so many layers the last one attends to all tokens, where the
        file has neither another number nor a list of its layers."""
        key, layers = "attention.sliding_window_pattern", self.layers()
        found = self.value(key, period)
        if isinstance(found, tuple):
            if len(found) != layers or not all(type(inside) is bool for inside in found):
                raise self.header.refusal(
                    f"{self.full(key)} is a list of {len(found)} and has to be one of {layers} true or false"
                )
            inside = list(found)
        else:
            every = self.whole(key, period)
            inside = [layer % every < every - 1 for layer in range(layers)]
        return ["sliding_attention" if one else "full_attention" for one in inside]

    def refuse(self, *keys: str) -> None:
        """Those that change what is computed, in ways that such a model is not read with."""
        for key in keys:
            if self.header.metadata.get(self.full(key)):
                raise self.header.refusal(
                    f"{self.full(key)} is not supported: serve the checkpoint that it was made of"
                )

    def wrong(self, key: str, found: Any) -> InvalidRequest:
        """The error of a key's value."""
        if isinstance(found, Texts):
            shown = f"a list of {found.count:,}"
        elif isinstance(found, tuple):
            shown = f"a list of {len(found):,}, {cut(repr(found[:4]), 60)}"
        else:
            shown = cut(repr(found), 60)
        return self.header.refusal(f"{self.full(key)} is {shown}")


def read_floats(header: GgufHeader, tensor: GgufTensor, count: int) -> list[float]:
    """The numbers of a tensor that becomes a part of config.json. Raises InvalidRequest for another type or number."""
    if tensor.kind.name != "F32" or tensor.shape != (count,):
        raise header.refusal(
            f"the tensor {tensor.name} is {tensor.kind.name} {list(tensor.shape)} and has to be F32 [{count}]"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.begin)
        return list(struct.unpack(f"<{count}f", file.read(tensor.nbytes)))


def token_ids(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """The ids that config.json has, by its keys."""
    # None, where classes have ids of their own.
    found: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    for key, called in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int:
            found[f"{called}_token_id"] = index
    return found
