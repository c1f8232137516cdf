"""Whether a checkpoint folder has the files that are read from it, whole: by names, sizes and headers alone."""

import json
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_LFS = b"version https://git-lfs"  # what a clone without git-lfs has in the place of a large file
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def require_tokenizer(folder: Path) -> None:
    """Raises InvalidRequest if there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if path.is_file():
        _require_content(path)
        return
    others = _present(folder, _OTHER_TOKENIZERS)
    advice = (
        f", only {', '.join(others)}: write one with transformers,"
        f' AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
        if others
        else ""
    )
    raise _bad(f"{folder} has no tokenizer.json{advice}")


def require_processor(folder: Path) -> None:
    """Raises InvalidRequest if nothing says how pictures are made into pixel values."""
    combined, alone = folder / "processor_config.json", folder / "preprocessor_config.json"
    if combined.is_file() and isinstance(read_json(combined).get("image_processor"), dict):
        return
    if not alone.is_file():
        raise _bad(f"{folder} has no {alone.name}, which says how pictures are prepared")
    read_json(alone)


def require_weights(folder: Path) -> None:
    """Raises InvalidRequest if weights are missing, cut short, or in another format than safetensors."""
    index = folder / INDEX
    if index.is_file():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise _bad(f'{index} has no "weight_map"')
        names = sorted({str(name) for name in files.values()})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise _bad(
                f"{folder} lacks {len(missing)} of {len(names)} files that {INDEX} names:"
                f" {_some(missing)}; download them"
            )
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise _bad(_no_weights(folder))
    for name in names:
        _require_whole(folder / name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _bad(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        _require_content(path)
        raise _bad(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise _bad(f"{path} is not a JSON object")
    return value


def _no_weights(folder: Path) -> str:
    others = _present(folder, _OTHER_WEIGHTS)
    if others:
        return (
            f"{folder} has its weights in {_some(others)}; only safetensors are read: download those"
            " of the model, or save it with transformers' save_pretrained"
        )
    stray = _present(folder, ("*.safetensors",))
    if stray:
        return f"{folder} has {_some(stray)}, but neither {SINGLE} nor {INDEX}: download that too"
    return f"{folder} has no *.safetensors: neither {SINGLE} nor {INDEX}"


def _require_whole(path: Path) -> None:
    """By the header, which says where the last tensor ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if length <= min(size - 8, _LONGEST_HEADER) else b""
    try:
        entries = json.loads(head)
        ends = [int(e["data_offsets"][1]) for n, e in entries.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        _require_content(path)
        raise _bad(
            f"{path} is no safetensors file, or only its beginning: download it again"
        ) from None
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise _bad(f"{path} has {size} bytes of {expected}: download it again")


def _require_content(path: Path) -> None:
    """Raises InvalidRequest for an empty file, and for the note that git-lfs leaves in the place of one."""
    with path.open("rb") as file:
        head = file.read(len(_LFS))
    if not head:
        raise _bad(f"{path} is empty: download it again")
    if head == _LFS:
        raise _bad(
            f"{path} is a git-lfs pointer, not the file: run `git lfs pull` in {path.parent}"
        )


def _present(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest("BAD_CHECKPOINT", what, field="model")
