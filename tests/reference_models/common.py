"""What the reference implementations share: folders, random weights, greedy generation, attention.

Everything computes one unbatched sequence in float32, without a cache: the whole sequence is
computed again for each token.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

Tensors = Mapping[str, Tensor]
Turn = tuple[str, str]  # role and text; each IMAGE in the text stands for one image
IMAGE = "<image>"
PLACEHOLDER = -200  # a row of an image, in families whose vocabulary has no id for it


@dataclass(frozen=True)
class Generated:
    """Greedy tokens, and the logits [tokens, vocabulary] that each was chosen from."""

    tokens: list[int]
    logits: Tensor


class Reference(ABC):
    """A model with images, loaded from a folder."""

    @abstractmethod
    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The prompt's ids with one placeholder for each embedding row; sizes are (width, height)."""

    @abstractmethod
    def pixel_values(self, image: Image) -> Tensor:
        """What the family's image processor makes of an image."""

    @abstractmethod
    def embed_image(self, image: Image) -> Tensor:
        """The rows [placeholders, hidden] that stand for an image in the language model."""

    @abstractmethod
    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]; `rows` are the images' embeddings, in order."""

    @torch.no_grad()
    def generate(self, ids: Sequence[int], images: Sequence[Image], count: int) -> Generated:
        """`count` greedy tokens. No id stops it."""
        rows = [self.embed_image(image) for image in images]
        return greedy(lambda sequence: self.logits(sequence, rows), ids, count)


def greedy(logits: Callable[[list[int]], Tensor], ids: Sequence[int], count: int) -> Generated:
    """Appends `count` times the largest of the last row of logits."""
    sequence, steps = list(ids), []
    with torch.no_grad():
        for _ in range(count):
            steps.append(logits(sequence)[-1])
            sequence.append(int(steps[-1].argmax()))
    return Generated(sequence[len(ids) :], torch.stack(steps))


class Draw:
    """Random parameters, equal for equal seeds: matrices N(0, 0.2), vectors jittered by 0.02."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int) -> Tensor:
        """A parameter of two or more dimensions."""
        return torch.randn(shape, generator=self._generator) * 0.2

    def bias(self, size: int) -> Tensor:
        """A vector around 0."""
        return torch.randn(size, generator=self._generator) * 0.02

    def scale(self, size: int) -> Tensor:
        """A vector around 1."""
        return self.bias(size) + 1.0

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, Tensor]:
        """`name.weight` [outputs, inputs] and, where wanted, `name.bias`."""
        made = {f"{name}.weight": self.weight(outputs, inputs)}
        return made | ({f"{name}.bias": self.bias(outputs)} if bias else {})

    def norm(self, name: str, size: int, bias: bool = True) -> dict[str, Tensor]:
        """`name.weight` and, where wanted, `name.bias`."""
        made = {f"{name}.weight": self.scale(size)}
        return made | ({f"{name}.bias": self.bias(size)} if bias else {})


def noise(width: int, height: int, seed: int = 0) -> Image:
    """An RGB image of random pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return fromarray(values)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer | None,
    **names: str,
) -> Path:
    """Writes config.json, model.safetensors and, where given, tokenizer.json.

    `names` of special tokens ("bos_token") go to tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_json(folder / "tokenizer_config.json", kind | names)
    return folder


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON object in a file."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file, empty where there is none."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as float32."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def below(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}


def count_layers(names: Iterable[str], prefix: str) -> int:
    """How many layers `prefix0.`, `prefix1.`, ... there are."""
    return len({n[len(prefix) :].split(".")[0] for n in names if n.startswith(prefix)})


def linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    """x W^T + b with `name.weight` and, where there is one, `name.bias`."""
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def layer_norm(x: Tensor, tensors: Tensors, name: str, eps: float) -> Tensor:
    """LayerNorm with `name.weight` and `name.bias`."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root of the mean square, times a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, concatenated over heads: [rows, heads * d].

    query [rows, heads, d]; key and value [columns, key heads, d], where key head j serves
    heads / key heads consecutive heads; seen [rows, columns] is true where a row sees a column.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value).flatten(1)


def causal(length: int) -> Tensor:
    """[length, length], true where a row sees a column."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def rotate_half(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of x [rows, heads, d]: dimension i turns with dimension i + d / 2."""
    size = x.shape[-1]
    frequencies = base ** (-torch.arange(0, size, 2).float() / size)
    angles = positions.float()[:, None] * frequencies
    cos, sin = (turn.repeat(1, 2)[:, None] for turn in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def fill_rows(
    ids: Sequence[int], is_image: Tensor, table: Tensor, rows: Sequence[Tensor]
) -> Tensor:
    """Embeddings [ids, hidden]: the table's rows, the images' rows where is_image [ids] is true."""
    embeds = table[torch.tensor(ids).masked_fill(is_image, 0)].clone()
    given = torch.cat([*rows, embeds[:0]])
    assert len(given) == int(is_image.sum()), "placeholders and rows differ in number"
    embeds[is_image] = given
    return embeds
