"""A `.flm` of FastLLM as the folder of a checkpoint."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from shared.checkpoint.conversion.flm import config
from shared.checkpoint.conversion.flm.file import FlmFile, open_flm
from shared.checkpoint.conversion.flm.kept_codes import KeptCodes
from shared.checkpoint.conversion.flm.tensor import BLOCK, FlmTensor, TensorKind
from shared.checkpoint.conversion.new_folder import new_folder
from shared.checkpoint.conversion.written_file import write_tensors
from shared.checkpoint.files import INDEXES
from shared.errors import InvalidRequest
from shared.text.tokenizer_formats.content import Content
from shared.text.tokenizer_formats.flm import flm_tokenizer

DTYPES = ("float16", "bfloat16", "float32")
_SHARD = 4 << 30  # bytes


def convert_flm(
    source: Path,
    destination: Path,
    dtype: str | None = None,
    say: Callable[[str], None] = print,
    *,
    keep_codes: bool = False,
    shard_bytes: int = _SHARD,
    block: int = BLOCK,
) -> None:
    """Writes the new folder `destination`, with the weights in `dtype` (of DTYPES), read again and compared.

    Without `dtype` it is bfloat16 where more than half of the elements are stored so, else float16. `say` gets a line
    for each file of weights, which has up to `shard_bytes` or one tensor; `block` is that of `FlmTensor.to`.
    keep_codes: linear layers of the file's most frequent kind of codes stay codes (`KeptCodes`).

    Raises InvalidRequest, before anything is written, for a file that is broken or whose model, vocabulary or tensors
    are not known; while writing, for a value that `dtype` has not; Precondition, naming the tensor, if what was written
    differs.
    """
    file = open_flm(source)
    kind = dtype or _usual(file.tensors)
    files = _json_files(file, source, kind)
    for tensor in file.tensors:
        tensor.require_ranges()
    shards = list(_shards(file.tensors, getattr(torch, kind).itemsize, shard_bytes))
    kept = KeptCodes.of(file.tensors) if keep_codes else None
    if kept is not None:
        files["config.json"] = {**files["config.json"], "quantization_config": kept.config()}
    with new_folder(destination) as folder:
        for name, content in files.items():
            _write_json(folder / name, content)
        _write_weights(folder, shards, getattr(torch, kind), say, block, kept)


def _usual(tensors: Sequence[FlmTensor]) -> str:
    brain = sum(tensor.elements for tensor in tensors if tensor.kind == TensorKind.BFLOAT16)
    return "bfloat16" if 2 * brain > sum(tensor.elements for tensor in tensors) else "float16"


def _json_files(file: FlmFile, source: Path, dtype: str) -> dict[str, Mapping[str, Any]]:
    """All files but the weights. Raises InvalidRequest for what cannot be served."""
    try:
        if file.adapters:
            names = ", ".join(file.adapters)
            raise ValueError(f"it has adapters ({names}): merge them into the model, export again")
        if not file.tensors:
            raise ValueError("it has no tensors")
        model = config.model_config(file.pairs, dtype)
        tokenizer = flm_tokenizer(file.words, file.special_tokens, file.pairs)
        _require_tokens(tokenizer)
        tokens = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        config.require_ids(model, [*tokens, *(word.index for word in file.words)])
        template = config.chat_template(file.pairs, tokens)
    except (ValueError, InvalidRequest) as error:
        raise InvalidRequest("UNSUPPORTED_FLM", f"{source}: {error}") from error
    return {
        "config.json": model,
        "generation_config.json": config.generation_config(file.pairs),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config.tokenizer_config(file.pairs, tokens, template),
    }


def _require_tokens(content: Content) -> None:
    """Raises ValueError unless the tokenizers library takes it, and a letter with it: services try that."""
    try:
        Tokenizer.from_str(json.dumps(content)).encode("\na")
    except Exception as error:  # the library has no class of its own
        raise ValueError(f"its vocabulary makes no tokenizer: {error}") from error


def _shards(
    tensors: Sequence[FlmTensor], itemsize: int, shard_bytes: int
) -> Iterator[list[FlmTensor]]:
    shard: list[FlmTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.elements * itemsize > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.elements * itemsize
    yield shard


def _write_weights(
    folder: Path,
    shards: Sequence[Sequence[FlmTensor]],
    dtype: torch.dtype,
    say: Callable[[str], None],
    block: int,
    kept: KeptCodes | None,
) -> None:
    where: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            name = "model.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for tensor in shard:
            if kept is not None and kept.takes(tensor):
                tensors |= kept.stored(tensor)
            else:
                tensors[tensor.name] = tensor.to(dtype, block)
        write_tensors(folder / name, tensors, {"format": "pt"})
        say(f"[{number}/{len(shards)}] {name}: {len(tensors)} tensors")
        where |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / INDEXES[0], index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
