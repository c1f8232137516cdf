"""A program: the tokenizer and the chat template of a GGUF file as files of a checkpoint folder.

`python -m shared.checkpoint.gguf.tokenizer_files FILE FOLDER`. A program of its own because it imports transformers,
which is large, and because the file may come from anywhere. Of sentencepiece transformers finds the merges.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from shared.checkpoint.gguf.byte_level import WAYS, byte_level

_PROCESSOR_S = 180  # of released tokenizers the slowest take some ten seconds
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_READ = (_BYTE_LEVEL, _SENTENCEPIECE)
# Architectures whose pieces have spaces of their own, and one of those whose texts get a space before them, behind each
# control token too, as in llama.cpp and in the tokenizer.json of Llama 2 and Mistral 7B.
_GEMMA = "gemma"
_PREFIXED = "phi3"
# Files of before there was a name.
_NAMELESS = "default"


def main(arguments: Sequence[str]) -> int:
    """Writes into the folder, which is there. Returns 1, with the reason in one line on the standard output, for what
    cannot be read."""
    file, folder = map(Path, arguments)
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    try:
        _write(file, folder)
    except Exception as error:  # of the library's many kinds
        print(" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    _forget_origin(folder / "tokenizer_config.json")
    return 0


def _write(file: Path, folder: Path) -> None:
    architecture, described, said = get_gguf_tokenizer(str(file))
    if (kind := described.get("tokenizer_type")) not in _READ:
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; {' and '.join(_READ)} are read")
    if kind == _BYTE_LEVEL:
        backend = _byte_level(described, said)
    else:
        gemma = architecture if architecture.startswith(_GEMMA) else ""
        backend, _ = convert_gguf_tokenizer(gemma or _PREFIXED, described)
        if not gemma and described.get("add_prefix_space") is False:
            _without_prefix(backend)
    known = {key: value for key, value in said.items() if value is not None}
    PreTrainedTokenizerFast(tokenizer_object=backend, **known).save_pretrained(folder)


def _byte_level(described: Mapping[str, Any], said: dict[str, Any]) -> Tokenizer:
    name = described.get("pre_tokenizer_type") or _NAMELESS
    if name not in WAYS:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}; {', '.join(WAYS)} are read")
    said.setdefault("add_bos_token", WAYS[name].begins)
    kinds = described.get("token_type") or ()
    return byte_level(WAYS[name], described["tokens"], kinds, described.get("merges") or ())


def _without_prefix(backend: Tokenizer) -> None:
    """Of sentencepiece that puts no space before a text."""
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _forget_origin(path: Path) -> None:
    """Where the file lies is not the tokenizer's."""
    said = json.loads(path.read_text(encoding="utf-8"))
    kept = {
        key: value for key, value in said.items() if key not in ("is_local", "local_files_only")
    }
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
