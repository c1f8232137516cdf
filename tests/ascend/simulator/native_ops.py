"""Which of torch's ops have a kernel on the NPU: the lists in torch_npu's wheel."""

from functools import cache
from pathlib import Path

import torch_npu
import yaml

_FILES = {
    "npu_native_functions_by_codegen.yaml": ("supported", "symint"),
    "npu_native_functions.yaml": ("supported",),
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is one


@cache
def names() -> frozenset[str]:
    """With overloads, such as `add.Tensor`."""
    folder = Path(torch_npu.__path__[0]) / "csrc" / "aten"
    found = set()
    for file, sections in _FILES.items():
        content = yaml.load((folder / file).read_text(), Loader=_LOADER)
        for section in sections:
            for entry in content[section]:
                schema = entry["func"] if isinstance(entry, dict) else entry
                found.add(schema.split("(")[0].strip())
    return frozenset(found)
