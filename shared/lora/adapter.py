"""One adapter's folder: adapter_config.json and adapter_model.safetensors, looked at without its weights."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from shared.bounded_file import open_regular
from shared.checkpoint.files import read_header
from shared.errors import InvalidRequest
from shared.lora.config import LoraConfig

WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """What is added to one linear layer: up(down(x)) times `scale`. `down` [rank, inputs] and `up` [outputs, rank] are
    names of tensors."""

    down: str
    up: str
    rank: int
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """`linears`: by the name of the module in the model's class."""

    folder: Path
    config: LoraConfig
    linears: Mapping[str, LoraLinear]

    @classmethod
    def open(cls, folder: Path, max_rank: int) -> "LoraAdapter":
        """Raises InvalidRequest for what is not served, naming the field or the tensor, and for a rank above
        `max_rank`."""
        config = LoraConfig.read(folder)
        return cls(folder, config, _linears(folder / WEIGHTS, config, max_rank))

    @cached_property
    def lora_id(self) -> str:
        """32 hexadecimal digits over what of the configuration counts and all bytes of the tensors: equal for equal
        adapters, whatever they are called. Reads the whole file. Raises InvalidRequest."""
        said = json.dumps(asdict(self.config), sort_keys=True)
        digest = hashlib.blake2b(said.encode(), digest_size=16)
        try:
            with open_regular(self.folder / WEIGHTS) as file:
                while piece := file.read(_AT_A_TIME):
                    digest.update(piece)
        except OSError as error:
            _refuse(self.folder / WEIGHTS, f"cannot be read: {error}")
        return digest.hexdigest()


def _linears(path: Path, config: LoraConfig, max_rank: int) -> dict[str, LoraLinear]:
    found: dict[str, dict[str, str]] = {}
    shapes = _shapes(path)
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if match is None:
            _refuse(path, f"the tensor {name[:200]} is not of a linear layer's LoRA")
        found.setdefault(match[1], {})[match[2]] = name
    if not found:
        _refuse(path, "has no tensors")
    return {
        module: _linear(path, module, names, shapes, config, max_rank)
        for module, names in found.items()
    }


def _linear(
    path: Path,
    module: str,
    names: Mapping[str, str],
    shapes: Mapping[str, list[int]],
    config: LoraConfig,
    max_rank: int,
) -> LoraLinear:
    if set(names) != {"A", "B"}:
        _refuse(path, f"{module} has lora_{'A' if 'A' in names else 'B'} alone")
    rank = config.rank_of(module)
    down, up = names["A"], names["B"]
    ranks = shapes[down][:1], shapes[up][1:]
    if ranks != ([rank], [rank]) or not len(shapes[down]) == len(shapes[up]) == 2:
        _refuse(path, f"{module} has {shapes[down]} and {shapes[up]}, and a rank of {rank}")
    if rank > max_rank:
        _refuse(path, f"{module} has a rank of {rank}, above --max-lora-rank {max_rank}")
    return LoraLinear(down, up, rank, config.scale_of(module))


def _shapes(path: Path) -> dict[str, list[int]]:
    try:
        header = json.loads(read_header(path))
        return {
            name: list(map(int, entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        _refuse(path, "does not exist")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse(path, f"cannot be read: {error!r}")


def _refuse(path: Path, why: str) -> NoReturn:
    raise InvalidRequest("BAD_ADAPTER", f"{path}: {why}")
