"""Whether a checkpoint folder has the files that are read from it, whole: by names, sizes and headers alone."""

import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.bounded_file import (
    LARGE,
    OutOfBounds,
    bounds_of,
    open_regular,
    parse,
    read_value,
)
from shared.checkpoint.gguf.architecture import GgufModel
from shared.checkpoint.gguf.header import read_header as read_gguf
from shared.checkpoint.gguf.vision.kinds import open_projector
from shared.checkpoint.whole_tensors import find_fault
from shared.errors import InvalidRequest
from shared.text.tokenizer_formats.other_files import find_other

# The names that weights have in a folder, the preferred first: one file, or an index of several.
SINGLES = ("model.safetensors", "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in SINGLES)
# What msmodelslim calls them: one index or one file of these.
_OF_ASCEND = ("quant_model_weight*.safetensors.index.json", "quant_model_weight*.safetensors")
GGUF = "model.gguf"  # of a folder that is made of a GGUF file (`gguf/prepared.py`)
MMPROJ = "mmproj.gguf"  # beside it: the vision part
_OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
_OTHER_TOKENIZERS = ("vocab.json", "vocab.txt", "tekken.json")
_LFS = b"version https://git-lfs"  # what a clone without git-lfs has in the place of a large file


def require_tokenizer(folder: Path) -> None:
    """Raises InvalidRequest if there is no tokenizer.json, and no file that is read in its place."""
    path = folder / "tokenizer.json"
    found = path if path.is_file() else find_other(folder)
    if found is not None:
        _require_content(found)
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


@dataclass(frozen=True, slots=True)
class Weights:
    """The file by which a folder's weights are found: an index, or all of them."""

    name: str
    is_index: bool


def find_weights(folder: Path) -> Weights | None:
    """Safetensors before `pytorch_model.bin`, an index before a single file, then what msmodelslim writes, and what a
    prepared folder has of a GGUF file; None if there is none."""
    for single, index in zip(SINGLES, INDEXES, strict=True):
        for name in (index, single):
            if (folder / name).is_file():
                return Weights(name, name == index)
    for pattern in _OF_ASCEND:
        found = _present(folder, (pattern,))
        if len(found) == 1:
            return Weights(found[0], pattern.endswith(".json"))
    return Weights(GGUF, False) if (folder / GGUF).is_file() else None


def require_weights(folder: Path) -> None:
    """Raises InvalidRequest if weights are missing, cut short, or in a format that is not read."""
    weights = find_weights(folder)
    if weights is None:
        raise _bad(_no_weights(folder))
    names, places = [weights.name], {}
    if weights.is_index:
        names = indexed_files(folder / weights.name)
        places = read_json(folder / weights.name)["weight_map"]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise _bad(
                f"{folder} lacks {len(missing)} of {len(names)} files that {weights.name} names:"
                f" {_some(missing)}; download them"
            )
    for name in names:
        if name.endswith(".safetensors"):
            require_indexed(folder / weights.name, places, name, _require_whole(folder / name))
        elif name == GGUF:
            GgufModel(read_gguf(folder / name)).require_tensors()
            if (folder / MMPROJ).is_file():
                open_projector(folder / MMPROJ)
        else:
            require_archive(folder / name)


def require_indexed(
    index: Path, places: Mapping[str, Any], name: str, stored: Collection[str]
) -> None:
    """Raises InvalidRequest if an index says, by the `places` of tensors in files, that a file has tensors that are not
    among the `stored` ones."""
    lacking = [tensor for tensor, file in places.items() if file == name and tensor not in stored]
    if lacking:
        raise _bad(
            f"{index.parent / name} lacks {_some(lacking)}, which {index.name} says is in it: download both again"
        )


def indexed_files(index: Path) -> list[str]:
    """The files that an index names, sorted. Raises InvalidRequest if it names none."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise _bad(f'{index} has no "weight_map"')
    return sorted({str(name) for name in files.values()})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest naming the file."""
    try:
        value = read_value(path, bounds_of(path.name))
    except FileNotFoundError:
        raise _bad(f"{path.parent} has no {path.name}") from None
    except OutOfBounds as error:
        raise _bad(str(error)) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        _require_content(path)
        raise _bad(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise _bad(f"{path} is not a JSON object")
    return value


def _no_weights(folder: Path) -> str:
    others = _present(folder, _OTHER_WEIGHTS)
    if others:
        return (
            f"{folder} has its weights in {_some(others)}; only {' and '.join(SINGLES)} are read, or their shards"
            " by an index: download those of the model, or save it with transformers' save_pretrained"
        )
    stray = _present(folder, ("*.safetensors",))
    if stray:
        return f"{folder} has {_some(stray)}, but neither {SINGLES[0]} nor {INDEXES[0]}: download that too"
    return f"{folder} has no weights: neither {SINGLES[0]} nor {INDEXES[0]}, nor {SINGLES[1]}"


def _require_whole(path: Path) -> Collection[str]:
    """By the header, which says where the last tensor ends. Returns the names of its tensors."""
    try:
        size = path.stat().st_size
        head = read_header(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        entries = parse(head, path, LARGE)
        ends = [int(e["data_offsets"][1]) for n, e in entries.items() if n != "__metadata__"]
    except OutOfBounds as error:
        raise _bad(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        _require_content(path)
        raise _bad(
            f"{path} is no safetensors file, or only its beginning: download it again"
        ) from None
    expected = 8 + len(head) + max(ends, default=0)
    if size < expected:
        raise _bad(f"{path} has {size} bytes of {expected}: download it again")
    if fault := find_fault(entries, size - 8 - len(head)):
        raise _bad(f"{path} cannot be used: {fault}: download it again")
    return list(entries)


def read_header(path: Path) -> bytes:
    """The header of a safetensors file, empty where the file is shorter. Raises InvalidRequest for one that is too long
    to be read, and for what is no file."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size - 8:
                return b""
            if length > LARGE.nbytes:
                raise OutOfBounds(
                    f"{path} has a header of {length:,} bytes; {LARGE.nbytes >> 20} MiB are the most that is read of it"
                )
            return file.read(length)
    except OutOfBounds as error:
        raise _bad(str(error)) from None


def require_archive(path: Path) -> None:
    """Raises InvalidRequest unless this is a whole zip archive, which `torch.save` writes since version 1.6: it ends
    with its directory.
    """
    _require_content(path)
    with open_regular(path) as file:
        if zipfile.is_zipfile(file):
            return
        file.seek(0)
        began = file.read(4)
    if began == b"PK\x03\x04":
        raise _bad(f"{path} is only the beginning of a file of torch.save: download it again")
    raise _bad(
        f"{path} is not in the zip format of torch.save, but in the one before version 1.6, which is not read: save"
        " the model again, as safetensors"
    )


def _require_content(path: Path) -> None:
    """Raises InvalidRequest for an empty file, and for the note that git-lfs leaves in the place of one."""
    try:
        with open_regular(path) as file:
            head = file.read(len(_LFS))
    except OutOfBounds as error:
        raise _bad(str(error)) from None
    except OSError as error:
        raise _unreadable(path, error) from None
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


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    return _bad(f"cannot read {path}: {error.strerror}")


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest("BAD_CHECKPOINT", what, field="model")
