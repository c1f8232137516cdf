"""A program: the tokenizer and the chat template of a GGUF file as files of a checkpoint folder, made by transformers.

`python -m shared.checkpoint.gguf.tokenizer_files FILE FOLDER`. A program of its own because it imports transformers,
which is large, and because the file may come from anywhere.
"""

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from shared.checkpoint.gguf.header import read_header

# Architectures that transformers does not know, and whose tokenizer they have.
_TOKENIZERS = {"qwen2vl": "qwen2"}
_PROCESSOR_S = 180  # of released tokenizers the slowest take some ten seconds


def main(arguments: Sequence[str]) -> int:
    """Writes into the folder, which is there. Returns 1, with the reason in one line on the standard output, for what
    transformers cannot read."""
    file, folder = map(Path, arguments)
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    try:
        kind = _TOKENIZERS.get(read_header(file).metadata["general.architecture"])
        known = {"tokenizer_type": kind} if kind else {}
        tokenizer = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True, **known
        )
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of the library's many kinds
        print(" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    _forget_origin(folder / "tokenizer_config.json")
    return 0


def _forget_origin(path: Path) -> None:
    """Where the file lies is not the tokenizer's."""
    said = json.loads(path.read_text(encoding="utf-8"))
    kept = {
        key: value for key, value in said.items() if key not in ("is_local", "local_files_only")
    }
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
