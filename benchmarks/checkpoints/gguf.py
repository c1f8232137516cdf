"""GGUF files of our text checkpoints for llama.cpp: `python -m benchmarks.checkpoints.gguf LLAMA_CPP MODEL FILE`.

llama.cpp's own converter does the work. It knows tokenizers by the ids of a test sentence, and ours, trained here, are
not on its list, so it is told that they cut text as Qwen2's do, which is how they were made (`checkpoints/words.py`).
LLAMA_CPP is a llama.cpp source folder: the source package of llama-cpp-python has one in `vendor/llama.cpp`.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def main(arguments: list[str]) -> int:
    """Converts. Returns 2 for bad usage."""
    if len(arguments) < 3:
        print(__doc__)
        return 2
    source, model, file = map(Path, arguments[:3])
    script = source / "convert_hf_to_gguf.py"
    if not script.exists():
        print(f"{source} has no convert_hf_to_gguf.py", file=sys.stderr)
        return 2
    for folder in (source / "gguf-py", source):
        sys.path.insert(0, str(folder))
    _name_our_tokenizer()
    sys.argv = [str(script), str(model), "--outfile", str(file), *arguments[3:]]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _name_our_tokenizer() -> None:
    import conversion.base as base  # of llama.cpp, found by the path above

    def known(self: Any, tokenizer: Any) -> str:
        return "qwen2"

    assert isinstance(base, ModuleType)
    base.TextModel.get_vocab_base_pre = known


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
