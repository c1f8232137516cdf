"""How msmodelslim says which layers of a checkpoint for Ascend NPUs are codes: `quant_model_description*.json`, a name
of a kind for each tensor. Without torch.

Written from the documents of msmodelslim (https://gitcode.com/Ascend/msmodelslim) and the sources of vllm-ascend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.cutting import cut

PATTERN = "quant_model_description*.json"
NUMBERS = "FLOAT"
# Activations of 8 bits with one step for all, with one for each token, and activations that stay as they are.
STATIC, DYNAMIC, WEIGHTS = "W8A8", "W8A8_DYNAMIC", "W8A16"
NARROW = "W4A8_DYNAMIC"  # codes of 4 bits
KINDS = (NUMBERS, STATIC, DYNAMIC, WEIGHTS, NARROW)
# The `version` from which two codes of 4 bits lie in a byte; others have one, as vllm-ascend reads them.
_TWO_A_BYTE = "1.0.0"
# Inputs of a group of NARROW, where files without `group_size` have scales for groups: vllm-ascend's default.
_USUAL_GROUP, _OF_GROUPS = 256, ".weight_scale_second"
# What is said of the whole model, and would change what layers or the cache compute.
_CACHE = ("kv_cache_type", "kv_quant_type", "fa_quant_type")
_NORMS = (".module.weight", ".module.bias")


@dataclass(frozen=True)
class Described:
    """`kinds`: of each layer by its name in the checkpoint; `group`: inputs of W8A16 and W4A8 that share a scale, 0 for
    all of an output's; `two_a_byte`: codes of 4 bits lie so, along outputs."""

    kinds: Mapping[str, str]
    group: int
    two_a_byte: bool


def find_description(checkpoint: Checkpoint) -> str | None:
    """The file's name, where there is one."""
    names = sorted(path.name for path in checkpoint.folder.glob(PATTERN))
    return names[0] if names else None


def read_description(checkpoint: Checkpoint, name: str) -> Described:
    """Raises InvalidRequest, naming file and field, for kinds of codes that are not read."""
    values = checkpoint.file(name)
    for key in _CACHE:
        if values.get(key):
            raise _refusal(checkpoint, name, f"{key}: quantized caches are not read")
    group = values.get("group_size")
    if group is None:
        group = _USUAL_GROUP if any(key.endswith(_OF_GROUPS) for key in values) else 0
    if type(group) is not int or group < 0:
        raise _refusal(checkpoint, name, f"group_size is {cut(repr(group), 60)}")
    kinds: dict[str, str] = {}
    for tensor, kind in values.items():
        layer, _, part = tensor.rpartition(".")
        if tensor.endswith(_NORMS) or (part == "bias" and layer.endswith("norm")):
            raise _refusal(checkpoint, name, f"{tensor}: norms that were moved are not read")
        if part == "weight" and layer:
            kinds[layer] = _kind(checkpoint, name, tensor, kind)
    return Described(kinds, group, values.get("version") == _TWO_A_BYTE)


def _kind(checkpoint: Checkpoint, name: str, tensor: str, kind: Any) -> str:
    if kind not in KINDS:
        known = f"{', '.join(KINDS[:-1])} and {KINDS[-1]}"
        raise _refusal(checkpoint, name, f"{tensor} is {cut(repr(kind), 60)}, and {known} are read")
    return str(kind)


def _refusal(checkpoint: Checkpoint, name: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        "UNSUPPORTED_CONFIG", f"{checkpoint.folder / name}: {what}", field="model"
    )
