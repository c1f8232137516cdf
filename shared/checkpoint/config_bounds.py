"""Numbers of `config.json` that no model has. Checked before anything is sized by them: a list with an entry for each
of a billion layers takes gigabytes before any weight is looked at."""

import math
import re
from collections.abc import Iterator
from typing import Any

from shared.text.cutting import cut

# Keys in the spellings of transformers' configurations, and the most that is taken.
_MOST = (
    (r"(^|_)(n|num)_(\w+_)?(layers?|blocks?)$", 10_000),
    (r"^(encoder|decoder|max_window)_layers$|^depths?$", 10_000),
    (r"(^|_)(n|num)_(\w+_)?(heads?|experts?|groups?)(_kv)?$|_attention_heads$", 100_000),
    (r"(^|_)(image|patch|kernel)_size$|(^|_)num_channels$", 100_000),
    (r"(^|_)(head|hidden|inner|ffn|embed|model)_(dim|size)$|^n_(embd|inner)$", 10_000_000),
    (r"(^|_)(intermediate|ffn_hidden)_size$|^d_(model|ff)$", 10_000_000),
    (r"(^|_)vocab_size$", 100_000_000),
    (r"^max_position_embeddings$|^n_positions$|^(max_)?seq(uence)?_?(len|length)$", 1_000_000_000),
)
_BOUNDS = tuple((re.compile(pattern), most) for pattern, most in _MOST)
_FINITE = re.compile(r"(eps|epsilon|theta|factor|scale|scaling|std|range)$")
_LONGEST = 60  # characters of a number in a message


def out_of_bounds(config: dict[str, Any]) -> str:
    """Which number of a configuration, or of a part of it, makes no sense and why; "" where all do.

    Infinity is taken where it may be a limit.
    """
    for path, key, value in _numbers(config, "", ""):
        if isinstance(value, float) and math.isnan(value):
            return f"{path} is NaN, which is no number"
        most = next((most for pattern, most in _BOUNDS if pattern.search(key)), None)
        if most is not None and not 0 <= value <= most:
            return f"{path} is {cut(str(value), _LONGEST)}; 0 to {most:,} are taken"
        if isinstance(value, float) and math.isinf(value) and _FINITE.search(key):
            return f"{path} is {value}, which is no finite number"
    return ""


def _numbers(value: Any, path: str, key: str) -> Iterator[tuple[str, str, float]]:
    """Each number with its path ("text_config.hidden_size"), and the key that it, or the list that it is in, has."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name), str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{place}]", key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, key, value
