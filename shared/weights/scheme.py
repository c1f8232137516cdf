"""How weights are quantized when a model is loaded: what `--quantization` may say. Without torch."""

from dataclasses import dataclass, replace

from shared.errors import InvalidRequest

AUTO, NONE = "auto", "none"  # weights as a checkpoint has them, and all of them as numbers


@dataclass(frozen=True)
class Scheme:
    """`bits` of a weight's codes; `group`: inputs that share a scale, 0 for all of an output's; `digits`: in how many
    activations are multiplied with codes, 2 (14 bits) or 1 (8 bits)."""

    bits: int
    group: int
    digits: int


_FAST_GROUP = 128  # of activations of 8 bits, too: for whole rows they are too coarse
_INT4_GROUP = 64
_INT4_GROUP_OF_SMALL = 32  # of models that have little to spare
SMALL = 1_000_000_000  # parameters; below, 4 bits without calibration are seen in answers
HEAD = Scheme(8, 0, 2)  # of the output matrix, whatever the scheme: it decides about tokens
SCHEMES = {
    "int8": HEAD,
    "int8g128": Scheme(8, 128, 2),
    "int8-fast": Scheme(8, _FAST_GROUP, 1),
    "int4": Scheme(4, _INT4_GROUP, 2),
    "int4g32": Scheme(4, 32, 2),
    "int4g64": Scheme(4, 64, 2),
    "int4g128": Scheme(4, 128, 2),
    "int4g256": Scheme(4, 256, 2),
}


def find_scheme(name: str, parameters: int) -> Scheme | None:
    """None where nothing is quantized. `parameters`: how many the model has; "int4" is in smaller groups where these
    are few. Raises InvalidRequest for a scheme that is not known."""
    if not makes_codes(name):
        return None
    if name not in SCHEMES:
        raise refused(name, f"it may be {', '.join((AUTO, NONE, *SCHEMES))}")
    if name == "int4" and parameters < SMALL:
        return replace(SCHEMES[name], group=_INT4_GROUP_OF_SMALL)
    return SCHEMES[name]


def makes_codes(name: str) -> bool:
    """Whether codes are made of weights that are stored as numbers."""
    return name not in (AUTO, NONE)


def refuse_for_transformers(name: str, kind: str) -> None:
    """Raises InvalidRequest for a name that makes codes: for a model of this kind whose layers the code of transformers
    runs."""
    if makes_codes(name):
        raise refused(
            name, f"the code of transformers runs the layers of {kind}; leave the flag away"
        )


def require_on_npu(name: str, is_310p: bool) -> None:
    """Raises InvalidRequest for a name whose codes no operator of such an NPU multiplies with."""
    if not is_310p or not makes_codes(name):
        return
    found = SCHEMES.get(name)
    if found is not None and found != HEAD:
        raise refused(
            name, "on an Ascend 310P weights have 8 bits and one scale for each output: int8"
        )


def refused(name: str, why: str) -> InvalidRequest:
    """The error of a scheme that cannot be had."""
    return InvalidRequest(
        "UNSUPPORTED_QUANTIZATION", f"--quantization {name}: {why}", field="quantization"
    )
