"""What an architecture of GGUF files is: which tensors it has, what transformers calls them, what its keys mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.keys import Keys


@dataclass(frozen=True)
class Part:
    """One tensor of a layer, or of the whole model, and its bias.

    `names` are transformers': several for a matrix whose rows are several layers, `rows` of each, or one with `{}` for
    the number of an expert, where a tensor of three dimensions has all. `sizes`: [out, inputs] as `Described.size`
    knows them. `heads`: for each name how many heads its rows are, where they lie in the order of ggml's rotation,
    whose pairs are neighbours, and "" else. `together`: transformers has each key head's queries, its key and its value
    together, and the file all queries first. `shift`: so much more is stored than the weight. `bias`: whether there has
    to be one; None where there may be. `instead`: another tensor that has the same.
    """

    names: str | tuple[str, ...]
    sizes: tuple[str, ...]
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    together: bool = False
    shift: float = 0.0
    optional: bool = False
    bias: bool | None = False
    instead: str = ""


@dataclass(frozen=True)
class Described:
    """A file's keys, and what it has tensors for."""

    keys: Keys
    stored: frozenset[str]  # names of tensors
    vocabulary: int

    def in_layers(self, name: str) -> bool:
        """Whether the first layer has a tensor, such as "attn_q.bias"."""
        return f"blk.0.{name}" in self.stored

    def size(self, sizes: str) -> int:
        """A sum such as "q+2k" of what `_SIZES` has."""
        found = 0
        for part in sizes.split("+"):
            name = part.lstrip("0123456789")
            found += int(part.removesuffix(name) or 1) * (self._size(name) if name else 1)
        return found

    def _size(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = _SIZES[name](self)
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, int]:
        return {}

    @property
    def header(self) -> GgufHeader:
        """The file's."""
        return self.keys.header


def _of_expert(found: Described) -> int:
    inner = found.keys.count("feed_forward_length")
    return found.keys.whole("expert_feed_forward_length", inner or None)


_SIZES: Mapping[str, Callable[[Described], int]] = {
    "t": lambda found: found.vocabulary,
    "c": lambda found: found.keys.whole("context_length"),
    "h": lambda found: found.keys.whole("embedding_length"),
    "n": lambda found: found.keys.whole("attention.head_count"),  # of queries
    "g": lambda found: found.keys.whole("attention.head_count_kv", found.size("n")),
    "d": lambda found: found.keys.whole("attention.key_length", found.size("h") // found.size("n")),
    "q": lambda found: found.size("n") * found.size("d"),  # queries, keys and values of a token
    "k": lambda found: found.size("g") * found.size("d"),
    "v": lambda found: found.size("g") * found.size("d"),
    "f": lambda found: found.keys.whole("feed_forward_length"),  # units of an MLP
    "e": lambda found: found.keys.whole("expert_count"),
    "m": _of_expert,  # units of an expert
    "s": lambda found: found.keys.whole("expert_shared_feed_forward_length"),
}


@dataclass(frozen=True)
class Architecture:
    """`model_type` and `name` of its class in transformers; `layer` and `whole`: its tensors, by the names that files
    have for them, without `.weight`; `config`: what config.json has beside what all have.

    `prefix`: before the number of a layer in transformers' names; `rotates_part`: of each head a part may be rotated
    alone; `known`: keys of `OTHER_MODELS` that it is read with; `variant`: another one that the same name stands for
    in some files.
    """

    model_type: str
    name: str
    layer: Mapping[str, Part]
    whole: Mapping[str, Part]
    config: Callable[[Described], dict[str, Any]]
    prefix: str = "model.layers."
    rotates_part: bool = False
    known: frozenset[str] = frozenset()
    variant: "Callable[[Keys], Architecture | None]" = lambda keys: None


# Keys that change what is computed: a model with another of them than its architecture knows is refused.
OTHER_MODELS = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "nextn_predict_layers",
)
