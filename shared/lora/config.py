"""adapter_config.json as PEFT writes it (peft/tuners/lora/config.py, 0.21), as far as it says what is computed."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shared.checkpoint.files import read_json
from shared.errors import InvalidRequest

CONFIG = "adapter_config.json"
Value = TypeVar("Value")

# What changes the computation where it is set, and is not done here.
_REFUSED = (
    *("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication"),
    *("target_parameters", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config"),
)
# Ways to begin a training that leave the model's own weights as they are; others take something out of these.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """`rank` and `alpha` of all linear layers but those that a pattern matches, by the name of the module."""

    rank: int
    alpha: float
    by_root: bool  # rank-stabilized: alpha / sqrt(rank) (Kalajdzievski, 2023)
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> "LoraConfig":
        """Raises InvalidRequest naming the file, and the field that is refused."""
        path = folder / CONFIG
        given = read_json(path)
        kind = given.get("peft_type", "LORA")
        if kind != "LORA":
            _refuse(path, "peft_type", f"is {kind!r}, and LORA alone is served")
        if (bias := given.get("bias", "none")) != "none":
            _refuse(path, "bias", f"is {bias!r}: train with bias none")
        for name in _REFUSED:
            if given.get(name):
                _refuse(path, name, "is set, and adapters with it are not served")
        init = given.get("init_lora_weights")
        if not any(init is one or (isinstance(init, str) and init == one) for one in _INITS):
            _refuse(
                path,
                "init_lora_weights",
                f"is {init!r}, which changes the model's own weights: convert the adapter with PEFT's"
                " save_pretrained(path_initial_model_for_weight_conversion=...)",
            )
        try:
            return cls(
                rank=_rank(given["r"]),
                alpha=float(given["lora_alpha"]),
                by_root=bool(given.get("use_rslora")),
                rank_pattern={k: _rank(v) for k, v in (given.get("rank_pattern") or {}).items()},
                alpha_pattern={k: float(v) for k, v in (given.get("alpha_pattern") or {}).items()},
            )
        except KeyError as error:
            _refuse(path, str(error.args[0]), "is missing")
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest("BAD_ADAPTER", f"{path} cannot be read: {error}") from error

    def rank_of(self, module: str) -> int:
        """Of the linear layer with this name."""
        return _matched(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of what is added to its outputs."""
        rank = self.rank_of(module)
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _matched(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    """As PEFT's `get_pattern_key` looks one up: the first that is the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _rank(value: Any) -> int:
    rank = int(value)
    if rank != value or rank < 1:
        raise ValueError(f"a rank of {value!r} is no whole number above 0")
    return rank


def _refuse(path: Path, field: str, why: str) -> NoReturn:
    raise InvalidRequest("UNSUPPORTED_ADAPTER", f"{path}: {field} {why}", field=field)
