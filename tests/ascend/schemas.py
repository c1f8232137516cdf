"""Writes the signatures of torch_npu's ops that our code may call, out of the wheels of its releases.

`python -m tests.ascend.schemas WHEEL ...`, the newest last; wheels come from `pip download --no-deps torch_npu==2.8.0`.
The result, tests/decoder/devices/torch_npu_schemas.json, is what every call is held against
(tests/decoder/devices/test_npu_calls.py). An op that is called for the first time is added to OPERATORS.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

TARGET = Path(__file__).parents[1] / "decoder" / "devices" / "torch_npu_schemas.json"
OPERATORS = frozenset(
    [
        "empty_with_format",
        "get_npu_format",
        "npu_add_rms_norm",
        "npu_apply_rotary_pos_emb",
        "npu_convert_weight_to_int4pack",
        "npu_dynamic_quant",
        "npu_format_cast",
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2",
        "npu_fusion_attention",
        "npu_gather_pa_kv_cache",
        "npu_grouped_matmul",
        "npu_incre_flash_attention",
        "npu_moe_finalize_routing",
        "npu_moe_gating_top_k_softmax",
        "npu_moe_init_routing_v2",
        "npu_moe_token_unpermute",
        "npu_mrope",
        "npu_prompt_flash_attention",
        "npu_quant_matmul",
        "npu_quantize",
        "npu_rms_norm",
        "npu_rotary_mul",
        "npu_scatter_pa_kv_cache",
        "npu_swiglu",
        "npu_top_k_top_p",
        "npu_trans_quant_param",
        "npu_weight_quant_batchmatmul",
        "_npu_flash_attention",
        "_npu_flash_attention_unpad",
        "_npu_paged_attention",
        "_npu_paged_attention_splitfuse",
        "_npu_quantize_per_tensor",
        "_npu_reshape_and_cache",
    ]
)
_CODEGEN = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_BY_HAND = "torch_npu/csrc/aten/npu_native_functions.yaml"
_SECTIONS = ("custom", "symint", "supported", "quant")
_HEADER = "torch_npu/include/third_party/op-plugin/op_plugin/include/AtbOpsInterface.h"
_ATB_LIBRARY = "torch_npu/lib/libop_plugin_atb.so"
_TYPES = {"at::Tensor": "Tensor", "int64_t": "int", "double": "float", "bool": "bool"}


def signatures(wheel: ZipFile) -> dict[str, list[str]]:
    """The schemas of OPERATORS, all overloads that return their results."""
    found: dict[str, list[str]] = {}
    for file in (_CODEGEN, _BY_HAND):
        content = yaml.safe_load(wheel.read(file))
        for section in _SECTIONS:
            for entry in content.get(section) or []:
                _add(found, entry["func"] if isinstance(entry, dict) else entry)
    return found


def _add(found: dict[str, list[str]], schema: str) -> None:
    name, signature, _ = schema.partition("(")
    name = name.strip()
    if name not in OPERATORS or not signature:  # some names come once more by themselves
        return
    # torch_npu gives the first argument this name where it registers the op.
    renamed = re.sub(r"^([^(]*\(Tensor(?:\([a-z]!\))?\??) self\b", r"\1 input", schema)
    if renamed not in found.setdefault(name, []):
        found[name].append(renamed)


def atb_signatures(header: str) -> dict[str, str]:
    """Of NNAL's ops, from their declarations in C++."""
    declared = re.findall(r"TORCH_NPU_API void (\w+)\((.*)\);", header)
    return {name: _atb_schema(name, arguments) for name, arguments in declared if name in OPERATORS}


def _atb_schema(name: str, arguments: str) -> str:
    parts = []
    for argument in arguments.split(","):
        is_optional = "optional<" in argument
        kind = next(ours for theirs, ours in _TYPES.items() if theirs in argument)
        written = re.sub(r".*\W", "", argument.strip())
        parts.append(f"{kind}? {written}=None" if is_optional else f"{kind} {written}")
    return f"{name}({', '.join(parts)}) -> ()"


def mangled(library: bytes) -> dict[bytes, bytes]:
    """Functions of NNAL's library as the linker knows them: name to name with types of arguments."""
    return {match[1]: match[0] for match in re.finditer(rb"_ZN3atb\d+(_npu_\w+?)ER?KN\w+", library)}


def main(wheels: list[str]) -> None:
    """Writes the file."""
    opened = {re.search(r"-(\d[^-]*)-", Path(path).name): ZipFile(path) for path in wheels}
    newest = list(opened.values())[-1]
    atb = atb_signatures(newest.read(_HEADER).decode())
    known = mangled(newest.read(_ATB_LIBRARY))
    result: dict[str, Any] = {}
    for match, wheel in opened.items():
        assert match, "not a wheel of torch_npu"
        # Older wheels carry no header; the same types in the same order are taken for the same arguments.
        here = mangled(wheel.read(_ATB_LIBRARY))
        same = [name for name in atb if here.get(name.encode()) == known[name.encode()]]
        result[match[1]] = dict(
            sorted({**signatures(wheel), **{name: [atb[name]] for name in same}}.items())
        )
        print(
            match[1], len(result[match[1]]), "ops; lacks", sorted(OPERATORS - set(result[match[1]]))
        )
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
