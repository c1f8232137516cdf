"""A Hugging Face checkpoint folder: its configuration as plain dictionaries, its tensors by name.

Reading configurations needs no torch; it is imported when the first tensor is asked for.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.bounded_file import OutOfBounds, bounds_of, read_value
from shared.checkpoint.config_bounds import out_of_bounds
from shared.checkpoint.files import GGUF, INDEXES, MMPROJ, SINGLES, find_weights, require_indexed
from shared.checkpoint.gguf.block_types import CODED
from shared.checkpoint.tensor_file import TensorFile, open_tensors
from shared.errors import InvalidRequest, NotFound
from shared.hardware.devices import default_dtype
from shared.text.cutting import cut

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# Of parts of config.json that say how weights are quantized.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_IDS = 1 << 31
_SMALL_MODEL_PARAMETERS = 100_000_000
# By safetensors' spelling; all others have one.
_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
# Codes of 4 bits in an element of these.
_CODES = {"I32": 8, "U8": 2}
# Composite configurations name their language part differently.
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


class Checkpoint:
    """The files of one model, read where and when they are asked for.

    `folder` must hold `config.json` and, for tensors, `model.safetensors`, else `pytorch_model.bin`, or the index
    of one of them with its shards. Every error names the file and the key. Not for use by several threads at a time.
    """

    def __init__(self, folder: Path, family: str = "") -> None:
        """`family`: the name of the one that it is served as; empty: found from `config.json`. Raises NotFound if the
        folder does not exist.
        """
        self.folder = Path(folder)
        self.family = family
        if not self.folder.is_dir():
            raise NotFound(
                "MODEL_NOT_FOUND",
                f"--model: {self.folder} is not a folder",
            )
        self._open: dict[str, TensorFile] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`. Raises InvalidRequest, naming the key, for numbers that no model has."""
        config = self._json("config.json")
        if wrong := out_of_bounds(config):
            raise self._bad("config.json", f"cannot be served: {wrong}")
        return config

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The language part of the configuration; all of it for a model without other parts."""
        parts = (self._part(key) for key in _TEXT_KEYS)
        return next((part for part in parts if part is not None), self.config)

    @cached_property
    def vision_config(self) -> dict[str, Any] | None:
        """The vision part of the configuration, if the model has one."""
        return self._part("vision_config")

    @cached_property
    def architecture(self) -> str:
        """The class the checkpoint was saved from, for instance "LlavaForConditionalGeneration"."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names:
            raise self._bad("config.json", 'has no "architectures"')
        return str(names[0])

    @property
    def kind(self) -> str:
        """What to call the model in messages: its architecture, or `model_type` where it names none."""
        names = self.config.get("architectures")
        return self.architecture if names else str(self.config.get("model_type"))

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or nothing where there is no such file."""
        if not (self.folder / "generation_config.json").exists():
            return {}
        return self._json("generation_config.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json`, or nothing where there is no such file."""
        if not (self.folder / "tokenizer_config.json").exists():
            return {}
        return self._json("tokenizer_config.json")

    @cached_property
    def image_processor_config(self) -> dict[str, Any]:
        """Settings of the image processor, where the version of transformers wrote them; nothing where none are."""
        return self._processor_config("image_processor", "preprocessor_config.json")

    @cached_property
    def video_processor_config(self) -> dict[str, Any]:
        """Settings of the video processor; nothing where none are."""
        return self._processor_config("video_processor", "video_preprocessor_config.json")

    def file(self, name: str) -> dict[str, Any]:
        """Another of its JSON files, an object. Raises NotFound where there is none, InvalidRequest for what is not."""
        return self._json(name)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, ascending: of the first configuration that names any. Raises InvalidRequest where
        that names something else."""
        for source in (self.generation_config, self.config, self.text_config):
            ids = source.get("eos_token_id")
            if ids is None:
                continue
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and abs(i) < _IDS for i in listed):
                raise InvalidRequest(
                    "BAD_CHECKPOINT",
                    f"{self.folder}: eos_token_id is {cut(str(ids), 60)}, which is no token's id and no list of them",
                    field="model",
                )
            return tuple(sorted(set(listed)))
        return ()

    def names(self) -> Sequence[str]:
        """All tensor names, sorted."""
        return sorted(self._files)

    def tensor(self, name: str) -> "torch.Tensor":
        """One tensor, mapped from its file: not to be written to."""
        return self._shard(name).tensor(name)

    def part(self, name: str, rows: slice, columns: slice) -> "torch.Tensor":
        """Some rows and columns of a matrix; the rest is not read. Not to be written to."""
        return self._shard(name).part(name, rows, columns)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header alone."""
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> str:
        """A tensor's element type as safetensors spells it ("F32", "BF16"), from the header."""
        return self._shard(name).dtype(name)

    def whole_numbers(self, name: str) -> "NDArray[np.int64]":
        """The content of a tensor of whole numbers."""
        found: NDArray[np.int64] = self.tensor(name).flatten().long().numpy()
        return found

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor as it is stored, from the header."""
        numbers, kind = math.prod(self.shape(name)), self.dtype(name)
        if (block := CODED.get(kind)) is not None:
            return numbers // block.elements * block.nbytes
        return numbers * _BYTES.get(kind, 1)

    def order(self, name: str) -> Sequence[int] | None:
        """Which stored row each row of a tensor is; None where they lie as they are counted."""
        return self._shard(name).order(name)

    @cached_property
    def is_gguf(self) -> bool:
        """Whether its tensors are those of a GGUF file, each in a type of its own."""
        weights = find_weights(self.folder)
        return weights is not None and weights.name == GGUF

    @property
    def origin(self) -> Path:
        """What to call it in messages about its tensors: its folder, or the GGUF file that this was made of."""
        return (self.folder / GGUF).resolve() if self.is_gguf else self.folder

    @cached_property
    def is_small(self) -> bool:
        """Fewer than 100 million parameters: quick in any type, and with one thread."""
        return self.num_parameters < _SMALL_MODEL_PARAMETERS

    @cached_property
    def num_parameters(self) -> int:
        """Numbers of all tensors; of codes, those that they stand for."""
        return sum(map(self._count, self.names()))

    def default_dtype(self, device: str) -> str:
        """What `--dtype auto` means on `device`: "float32", "bfloat16" or "float16".

        On a CPU float32 for small models and for weights that are mostly stored so; bfloat16 for everything else.
        Decoder and encoder ask here, so they agree.
        """
        if device != "cpu":
            return default_dtype(device)
        sizes: dict[str, int] = {}
        for name in self.names():
            kind = self.dtype(name)
            sizes[kind] = sizes.get(kind, 0) + self._count(name)
        wide = self.is_small or max(sizes, key=sizes.__getitem__) == "F32"
        return "float32" if wide else default_dtype(device)

    def _count(self, name: str) -> int:
        """Numbers that a tensor stands for: words of 32 bits are eight codes each, bytes without a sign two."""
        return math.prod(self.shape(name)) * _CODES.get(self.dtype(name), 1)

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._files[name]

    def close_file(self, file: str) -> None:
        """Unmaps one file as soon as no tensor keeps it mapped; it is opened again when it is read again."""
        self._open.pop(file, None)

    def close(self) -> None:
        """Unmaps the files that no tensor keeps mapped."""
        self._open.clear()

    def _processor_config(self, part: str, alone: str) -> dict[str, Any]:
        """A part of processor_config.json, or the file that older versions wrote instead."""
        combined: dict[str, Any] = {}
        if (self.folder / "processor_config.json").is_file():
            combined = self._json("processor_config.json")
        found = combined.get(part)
        if isinstance(found, dict):
            return found
        return self._json(alone) if (self.folder / alone).is_file() else {}

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """Tensor name to file name."""
        weights = find_weights(self.folder)
        if weights is None:
            raise NotFound(
                "CHECKPOINT_INCOMPLETE",
                f"{self.folder} holds neither {' nor '.join((*SINGLES, *INDEXES))}",
            )
        if not weights.is_index:
            files = [weights.name]
            if weights.name == GGUF and (self.folder / MMPROJ).is_file():
                files.append(MMPROJ)
            return {name: file for file in files for name in self._file(file).names()}
        places = self._json(weights.name).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise self._bad(weights.name, 'has no "weight_map"')
        missing = sorted({f for f in places.values() if not (self.folder / f).exists()})
        if missing:
            raise NotFound(
                "CHECKPOINT_INCOMPLETE",
                f"{self.folder}: {weights.name} names {', '.join(missing)}, which is not there",
            )
        return places

    def _shard(self, name: str) -> TensorFile:
        file = self._files.get(name)
        if file is None:
            raise NotFound("TENSOR_NOT_FOUND", f"{self.folder} has no tensor {name!r}")
        return self._file(file)

    def _file(self, file: str) -> TensorFile:
        if file not in self._open:
            try:
                opened = open_tensors(self.folder / file)
            except (ValueError, OSError) as error:
                raise self._bad(file, f"cannot be read: {error}") from error
            weights = find_weights(self.folder)
            if weights is not None and weights.is_index:
                stored = set(opened.names())
                require_indexed(self.folder / weights.name, self._files, file, stored)
            self._open[file] = opened
        return self._open[file]

    def _json(self, file: str) -> dict[str, Any]:
        try:
            value = read_value(self.folder / file, bounds_of(file))
        except FileNotFoundError:
            raise NotFound("CHECKPOINT_INCOMPLETE", f"{self.folder} has no {file}") from None
        except OutOfBounds as error:
            raise InvalidRequest("BAD_CHECKPOINT", str(error), field="model") from None
        except (OSError, ValueError) as error:
            raise self._bad(file, f"is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self._bad(file, "is not a JSON object")
        return value

    def _part(self, key: str) -> dict[str, Any] | None:
        """A part of the configuration; a name of another repository in its place is none."""
        part = self.config.get(key)
        if part is None or isinstance(part, str):
            return None
        if not isinstance(part, dict):
            raise self._bad("config.json", f"cannot be served: {key} is no JSON object")
        return part

    def _bad(self, file: str, what: str) -> InvalidRequest:
        return InvalidRequest("BAD_CHECKPOINT", f"{self.folder / file} {what}")
