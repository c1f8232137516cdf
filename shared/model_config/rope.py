"""The rotation of queries and keys, as config.json describes it.

In both spellings of `transformers.modeling_rope_utils`: `rope_parameters`, or `rope_theta` with `rope_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import InvalidRequest

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_DEFAULT_SECTIONS = (16, 24, 24)
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Kind, base and parameters of the rotation of heads: of the first `size` of their `head_size` elements, in pairs
    of neighbours (`interleaved`) or of an element of the first half and one of the second."""

    kind: str
    theta: float
    size: int
    head_size: int
    max_position_embeddings: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False

    @classmethod
    def read(
        cls, config: Mapping[str, Any], head_size: int, may_be_partial: bool = False
    ) -> "RopeConfig":
        """From a text configuration. may_be_partial: of this family a part of each head may be rotated;
        others ignore the key.

        Raises InvalidRequest naming the kind or key it lacks.
        """
        # As upstream: the old spelling wins where both are there.
        parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        kind = str(parameters.get("rope_type", parameters.get("type", "default")))
        if kind == "mrope":  # the default frequencies; the model file divides them among axes
            kind = "default"
        if kind not in KINDS:
            raise _bad(f"rope_type {kind!r}; there are {', '.join(KINDS)}")
        # As upstream: one beside the parameters goes before one among them.
        if original := config.get(_ORIGINAL):
            parameters[_ORIGINAL] = original
        missing = [key for key in _NEEDED.get(kind, ()) if parameters.get(key) is None]
        if kind == "yarn" and parameters.get(_ORIGINAL):
            missing = []  # the factor follows from the two lengths
        if missing:
            raise _bad(f"rope_type {kind!r} needs {', '.join(missing)}")
        partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if not may_be_partial and kind == "default":
            # As upstream: the class has no such key, and its other kinds fail with one.
            partial = None
        size = head_size if partial is None else int(head_size * float(partial))
        if size % 2 or not 0 < size <= head_size or (size < head_size and not may_be_partial):
            raise _bad(f"partial_rotary_factor {partial} is not supported")
        if kind == "longrope":
            _check_factors(parameters, size // 2)
        return cls(
            kind=kind,
            theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            size=size,
            head_size=head_size,
            max_position_embeddings=int(config["max_position_embeddings"]),
            parameters=parameters,
            interleaved=bool(config.get("rope_interleaved")),
        )

    @property
    def original_length(self) -> int:
        """The length the model was first trained with."""
        given = self.parameters.get(_ORIGINAL)
        return int(given or self.max_position_embeddings)

    def sections(self) -> tuple[int, ...]:
        """How the frequencies of a head are divided among axes of positions (M-RoPE).

        Raises InvalidRequest for sections that are not the frequencies of a head.
        """
        given = self.parameters.get("mrope_section") or _DEFAULT_SECTIONS
        sections = tuple(int(size) for size in given)
        if min(sections) < 0 or sum(sections) != self.size // 2:
            raise _bad(
                f"mrope_section {list(sections)} does not divide the {self.size // 2} frequencies"
                " of a head"
            )
        return sections


def _check_factors(parameters: Mapping[str, Any], frequencies: int) -> None:
    for key in _NEEDED["longrope"]:
        if len(parameters[key]) != frequencies:
            raise _bad(f"{key} has {len(parameters[key])} entries for {frequencies} frequencies")


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest("UNSUPPORTED_CONFIG", f"config.json: {what}", field="model")
