"""The language part of a checkpoint, under one spelling of its names."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import structlog
from torch import Tensor

from services.decoder.weights.linear_weight import LinearWeight, StoredWeight
from services.families import registry
from services.families.family import GENERIC_ENCODER
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.errors import InvalidRequest

# Composite checkpoints spell the same tensor in several ways, by age:
# language_model.model.X, model.language_model.X (and lm_head in both); plain ones say model.X.
_PREFIXES = ("language_model.model.", "model.language_model.", "model.")
_HEADS = ("language_model.lm_head.", "lm_head.")
log = structlog.get_logger(__name__)


def canonical_name(name: str) -> str:
    """A language tensor's name without the prefixes of composite checkpoints."""
    for prefix in _HEADS:
        if name.startswith(prefix):
            return "lm_head." + name.removeprefix(prefix)
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


class LanguageWeights:
    """Tensors by canonical name ("layers.0.self_attn.q_proj.weight", "lm_head.weight").

    `canonical` gives a stored tensor's canonical name; `known` matches those of the family, `ignored` those that may be
    there unused.
    Every name of the checkpoint must be known, ignored or the vision encoder's; `finish` checks
    that each known one but for biases was taken, and says how long that took.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        known: str,
        ignored: str = "",
        canonical: Callable[[str], str] = canonical_name,
    ) -> None:
        self._checkpoint = checkpoint
        # Whether nothing is generated with it, so that it need not have an output matrix.
        self.pools_only = registry.is_for_vectors(checkpoint)
        self._names: dict[str, str] = {}
        unknown = []
        language_name = language_names(checkpoint)
        for name in checkpoint.names():
            own = language_name(name)
            if own is None:
                continue
            found = canonical(own)
            if re.fullmatch(known, found):
                self._names[found] = name
            elif not (ignored and re.fullmatch(ignored, found)):
                unknown.append(name)
        if unknown:
            raise self._bad("the model has no place for", unknown)
        self._taken: set[str] = set()
        self._reader = WeightReader(checkpoint, self._names.values())

    def __contains__(self, canonical: str) -> bool:
        return canonical in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def shape(self, canonical: str) -> tuple[int, ...]:
        """Of a tensor as it is stored. Raises InvalidRequest if it is missing."""
        if canonical not in self._names:
            raise self._bad("the checkpoint lacks", [canonical])
        return self._checkpoint.shape(self._names[canonical])

    def take(self, canonical: str, *shape: int) -> Tensor:
        """One tensor, mapped. Raises InvalidRequest if it is missing or has another shape."""
        return self._reader.tensor(self._claim(canonical, shape))

    def take_linear(
        self, name: str, out: int, inputs: int, bias: bool = False, factor: float = 1
    ) -> LinearWeight:
        """A linear layer: the tensors `name`.weight [out, inputs] and, with `bias`, `name`.bias [out]. The weight is
        read when it is packed, of a shard nothing but its part; it is multiplied by `factor` in the type in which it is
        stored. Raises InvalidRequest as `take` does."""
        stored = self._claim(f"{name}.weight", (out, inputs))
        shift = self.take(f"{name}.bias", out) if bias else None
        read = partial(self._reader.part, stored)

        def scaled(rows: slice, columns: slice) -> Tensor:
            return read(rows, columns) * factor

        return StoredWeight(name, out, inputs, shift, read if factor == 1 else scaled)

    def finish(self) -> None:
        """Raises InvalidRequest if a tensor of the model was never asked for. Biases are left out with a warning, as by
        transformers: fine-tunes store some that the model's class does not have."""
        left = sorted(self._names[name] for name in self._names if name not in self._taken)
        biases = [name for name in left if name.endswith(".bias")]
        if len(left) > len(biases):
            raise self._bad(
                "config.json has no use for", [name for name in left if name not in biases]
            )
        if biases:
            log.warning(
                "biases that config.json has no use for are left out",
                names=biases[:5],
                number=len(biases),
            )
        self._reader.finish()

    def _claim(self, canonical: str, shape: tuple[int, ...]) -> str:
        """The name in the checkpoint of a tensor that has this shape; it counts as taken."""
        if canonical not in self._names:
            raise self._bad("the checkpoint lacks", [canonical])
        name = self._names[canonical]
        found = self._checkpoint.shape(name)
        if found != shape:
            raise self._bad(f"config.json says {list(shape)} but stored is {list(found)}:", [name])
        self._taken.add(canonical)
        return name

    def _bad(self, what: str, names: Sequence[str]) -> InvalidRequest:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return InvalidRequest(
            "BAD_CHECKPOINT", f"{self._checkpoint.folder}: {what} {shown}", field="model"
        )


def language_names(checkpoint: Checkpoint) -> Callable[[str], str | None]:
    """Gives a stored tensor's name as a checkpoint without other parts has it; None for one of the encoder's."""
    family = registry.find(checkpoint)
    if family.encoder == GENERIC_ENCODER:
        return _names_of_class(checkpoint)
    encoders = "|".join(map(re.escape, family.encoder_tensors))
    foreign = re.compile(rf"(model\.)?({encoders})(\.|$)" if encoders else "(?!)")
    return lambda name: None if foreign.match(name) else name


def _names_of_class(checkpoint: Checkpoint) -> Callable[[str], str | None]:
    """The same by the place where the decoder hangs in the class of transformers."""
    # transformers takes seconds to import, and most models do without.
    from shared.checkpoint.model_half import decoder_paths, model_class, read_config

    paths = decoder_paths(model_class(checkpoint), read_config(checkpoint))
    own = tuple(f"{path}." for path in paths if not path.endswith("lm_head"))
    prefixes = (*_PREFIXES[:2], *own)

    def language_name(name: str) -> str | None:
        if name.startswith(_HEADS):
            return name
        found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return found and "model." + name.removeprefix(found)

    return language_name
