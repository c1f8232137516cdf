"""A copy of a checkpoint in which a part is taken out of the names of tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.checkpoint.conversion.new_folder import new_folder
from shared.checkpoint.conversion.side_files import copy_side_files, side_files
from shared.checkpoint.conversion.written_file import Tensors, write_tensors
from shared.checkpoint.files import (
    INDEXES,
    Weights,
    find_weights,
    indexed_files,
    read_json,
    require_weights,
)
from shared.checkpoint.tensor_file import TensorFile, open_tensors
from shared.errors import InvalidRequest


def strip_infix(
    source: Path, destination: Path, infix: str, say: Callable[[str], None] = print
) -> None:
    """Writes the checkpoint `source` to the new folder `destination` as safetensors, without `infix` in any name.

    Of tensors that are one in memory the first is written; the file's metadata record the others ("dropped": "kept").
    Index and records get the new names, all other files are copied. What was written is read again and compared.
    `say` gets a line for each file of weights.
    Raises InvalidRequest for what cannot be copied, before anything is written; Precondition naming the tensor if the
    copy differs.
    """
    _require_apart(source, destination)
    require_weights(source)
    weights = find_weights(source)
    assert weights is not None  # or the line before had raised
    files = indexed_files(source / weights.name) if weights.is_index else [weights.name]
    _require_new_names(source, files, infix)
    others = side_files(source, {*files, weights.name})
    total = 0
    where: dict[str, str] = {}
    with new_folder(destination) as folder:
        copy_side_files(source, others, folder)
        for number, name in enumerate(files, 1):
            tensors, metadata = _renamed(_open(source / name), infix)
            written = _safetensors_name(name)
            write_tensors(folder / written, tensors, metadata)
            say(f"[{number}/{len(files)}] {written}: {len(tensors)} tensors")
            total += sum(tensor.nbytes for tensor in tensors.values())
            where |= dict.fromkeys(tensors, written)
        if weights.is_index:
            _write_index(source, weights, folder, where, total)


def _require_apart(source: Path, destination: Path) -> None:
    if destination.resolve().is_relative_to(source.resolve()):
        raise InvalidRequest(
            "SAME_FOLDER", f"{destination} is {source} or lies in it: give another folder"
        )


def _require_new_names(source: Path, files: list[str], infix: str) -> None:
    """Raises InvalidRequest if two names become one, or if no name changes."""
    names = [name for file in files for name in _open(source / file).names()]
    if not any(infix in name for name in names):
        raise InvalidRequest("NO_SUCH_INFIX", f"{source}: no tensor has {infix!r} in its name")
    taken: dict[str, str] = {}
    for name in names:
        other = taken.setdefault(name.replace(infix, ""), name)
        if other != name:
            raise InvalidRequest(
                "NAMES_COLLIDE", f"{source}: {other} and {name} get the same name without {infix!r}"
            )


def _open(path: Path) -> TensorFile:
    try:
        return open_tensors(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest("BAD_CHECKPOINT", f"{path} cannot be read: {error}") from error


def _renamed(file: TensorFile, infix: str) -> tuple[Tensors, dict[str, str]]:
    """A file's tensors and metadata under the new names."""
    names = file.names()
    metadata = {"format": "pt"}
    for key, value in file.metadata().items():
        is_record = value in names
        metadata[key.replace(infix, "") if is_record else key] = (
            value.replace(infix, "") if is_record else value
        )
    kept: Tensors = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in _all(file).items():
        new = name.replace(infix, "")
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape) if tensor.numel() else (new,)
        same = first.setdefault(place, new)
        if same == new:
            kept[new] = tensor
        else:
            metadata[new] = same
    return _without_overlaps(kept), metadata


def _all(file: TensorFile) -> Tensors:
    """All at a time: an address tells tensors apart only as long as each is in memory."""
    return {name: file.tensor(name) for name in file.names()}


def _without_overlaps(tensors: Tensors) -> Tensors:
    """Copies of those that lie in the memory of another: the format has none that overlap."""
    apart, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        apart[name] = tensor.clone() if tensor.data_ptr() < end else tensor
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart


def _safetensors_name(name: str) -> str:
    if name.endswith(".safetensors"):
        return name
    return name.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def _write_index(
    source: Path, weights: Weights, folder: Path, where: Mapping[str, str], total: int
) -> None:
    metadata = read_json(source / weights.name).get("metadata") or {}
    index = {
        "metadata": {**metadata, "total_size": total},
        "weight_map": dict(sorted(where.items())),
    }
    (folder / INDEXES[0]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
