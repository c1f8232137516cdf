"""How positions are scaled: `rope_parameters` of config.json, of a GGUF file's keys and tensors."""

from typing import Any

from shared.checkpoint.gguf.keys import Keys, read_floats
from shared.text.cutting import cut

# Tensors of factors by which frequencies are divided, each by its own number: they become a part of config.json.
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_parameters(keys: Keys, rotated: int) -> dict[str, Any]:
    """rotated: elements of a head that are. Raises InvalidRequest, naming key or tensor."""
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.positive("rope.freq_base", 1e4),
    }
    tensors = keys.header.tensors
    if FREQUENCIES in tensors:
        divided = read_floats(keys.header, tensors[FREQUENCIES], rotated // 2)
        # Of one factor for each frequency, here the same for all lengths.
        return found | _long(divided, divided, 1.0, keys.whole("context_length"))
    if LONG in tensors or SHORT in tensors:
        for name in (LONG, SHORT):
            if name not in tensors:
                raise keys.header.refusal(f"it lacks {name} [{rotated // 2}]")
        long, short = (read_floats(keys.header, tensors[n], rotated // 2) for n in (LONG, SHORT))
        original = keys.whole("rope.scaling.original_context_length")
        factor = keys.positive("rope.scaling.attn_factor", 1.0)
        return found | _long(long, short, factor, original)
    return found | _scaled(keys)


def _scaled(keys: Keys) -> dict[str, Any]:
    kind = keys.value("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 0.0)
    if kind == "none" or not factor:
        return {}
    if kind not in ("linear", "yarn"):
        raise keys.header.refusal(
            f"{keys.full('rope.scaling.type')} is {cut(repr(kind), 40)}; none, linear and yarn are read, and longrope"
            " by its tensors of factors"
        )
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = keys.whole("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = original
        if (given := keys.number("rope.scaling.attn_factor", 1.0)) != 1:
            raise keys.header.refusal(
                f"{keys.full('rope.scaling.attn_factor')} is {given}: that is not supported"
            )
        for key, called in _YARN.items():
            if keys.has(f"rope.scaling.{key}"):
                found[called] = keys.positive(f"rope.scaling.{key}")
        if keys.has("rope.scaling.yarn_attn_factor"):
            found["attention_factor"] = keys.positive("rope.scaling.yarn_attn_factor")
    return found


def _long(long: list[float], short: list[float], factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": 1.0,
        "attention_factor": factor,
        "original_max_position_embeddings": original,
    }
