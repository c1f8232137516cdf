"""Which of torch's ops have a kernel on the NPU: the lists in torch_npu's wheel, read once and kept as JSON."""

import json
from functools import cache
from pathlib import Path

import yaml

from tests.ascend.runtime.build import LIBRARIES, WHEEL

_FILES = {
    "npu_native_functions_by_codegen.yaml": ("supported", "symint"),
    "npu_native_functions.yaml": ("supported",),
}


@cache
def names() -> frozenset[str]:
    """With overloads, such as `add.Tensor`."""
    kept = LIBRARIES / "native_ops.json"
    if not kept.is_file():
        found = _read(WHEEL / "csrc" / "aten")
        fresh = kept.with_suffix(".new")
        fresh.write_text(json.dumps(sorted(found)))
        fresh.replace(kept)
        return found
    return frozenset(json.loads(kept.read_text()))


def _read(folder: Path) -> frozenset[str]:
    found = set()
    for file, sections in _FILES.items():
        content = yaml.safe_load((folder / file).read_text())
        for section in sections:
            for entry in content[section]:
                schema = entry["func"] if isinstance(entry, dict) else entry
                found.add(schema.split("(")[0].strip())
    return frozenset(found)
