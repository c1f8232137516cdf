"""The language part of a checkpoint, under one spelling of its names."""

import re
from collections.abc import Callable

import structlog

from services.families import registry
from services.families.family import GENERIC_ENCODER
from shared.checkpoint.folder import Checkpoint
from shared.model_config.quantization import read_stored_codes
from shared.weights.layouts.stored_layers import is_unused, split_name
from shared.weights.named_weights import NamedWeights

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


class LanguageWeights(NamedWeights):
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
        # Whether nothing is generated with it, so that it need not have an output matrix.
        self.pools_only = registry.is_for_vectors(checkpoint)
        names: dict[str, str] = {}
        unknown = []
        language_name = language_names(checkpoint)
        codes = read_stored_codes(checkpoint)
        for name in checkpoint.names():
            own = language_name(name)
            if own is None:
                continue
            # A layer's codes are known by the name of its weight.
            parts = split_name(codes, own) if codes else None
            found = canonical(f"{parts[0]}.weight" if parts else own)
            is_known = re.fullmatch(known, found) is not None
            if parts:
                found = f"{found.removesuffix('weight')}{parts[1]}"
            if is_known and codes and is_unused(codes, own):
                continue
            if is_known:
                names[found] = name
            elif not (ignored and re.fullmatch(ignored, found)):
                unknown.append(name)
        super().__init__(checkpoint, names, codes)
        if unknown:
            raise self._bad("the model has no place for", unknown)

    def finish(self) -> None:
        """Raises InvalidRequest if a tensor of the model was never asked for. Biases are left out with a warning, as by
        transformers: fine-tunes store some that the model's class does not have."""
        biases = [name for name in self._left() if name.endswith(".bias")]
        self._taken.update(biases)
        super().finish()
        if biases:
            log.warning(
                "biases that config.json has no use for are left out",
                names=[self._names[name] for name in biases[:5]],
                number=len(biases),
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
