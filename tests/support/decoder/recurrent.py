"""A small decoder whose layers keep state for each sequence: a causal convolution and a gated recurrence behind it, by
themselves or between layers of attention. It is served as the family of an installed package would be."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.layer_spec import LayerSpec, Paged, State
from services.decoder.steps.attention_meta import AttnMeta, Packed, PagedKV
from services.decoder.steps.needs import Needs
from services.decoder.steps.slot_state import LayerState, StateTensor
from services.decoder.steps.step import Step
from services.families import registry
from services.families.family import Family
from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import TextSizes
from shared.weights.coded_rows import Table
from shared.weights.linear_weight import in_memory

RECURRENT, ATTENTION = "recurrent", "attention"
PURE = (RECURRENT, RECURRENT)
HYBRID = (RECURRENT, ATTENTION, RECURRENT)
VOCABULARY = 400
_NAME = "tiny_recurrent"
_HIDDEN, _HEADS, _SIZE = 32, 2, 16
_TAPS = 3  # inputs that the convolution sees
_EPS = 1e-6
# What each kind of layer multiplies with, [hidden, hidden] each.
_MATRICES = {RECURRENT: ("inputs", "keep", "gate", "output"), ATTENTION: ("q", "k", "v", "output")}


@dataclass(frozen=True)
class _Layer:
    kind: str
    norm: Tensor
    matrices: dict[str, Packed]
    taps: Tensor | None  # [taps, hidden]


class RecurrentDecoder(DecoderModel):
    """Hidden rows go through each layer behind a norm, and what it gives is added to them."""

    needs = Needs(state=True)

    def __init__(self, config: TextSizes, ops: BaseOps, layers: Sequence[_Layer]) -> None:
        self.config = config
        self.layers: list[LayerSpec] = [
            _state(ops.dtype)
            if layer.kind == RECURRENT
            else Paged(_HEADS, _SIZE, _SIZE, dtype=ops.dtype)
            for layer in layers
        ]
        self._ops, self._layers = ops, layers
        self._table: Table
        self._norm: Tensor
        self._head: Packed

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> "RecurrentDecoder":
        """See `DecoderModel.load`."""

        def layer(number: int, kind: str) -> _Layer:
            def stored(name: str) -> Tensor:
                return checkpoint.tensor(f"layers.{number}.{name}")

            matrices = {name: ops.pack(in_memory(stored(name))) for name in _MATRICES[kind]}
            taps = ops.vector(stored("taps")) if kind == RECURRENT else None
            return _Layer(kind, ops.vector(stored("norm")), matrices, taps)

        kinds = checkpoint.config["layer_types"]
        model = cls(read_sizes(checkpoint), ops, [layer(*one) for one in enumerate(kinds)])
        table = checkpoint.tensor("embedding")
        model._table = ops.embedding_table(table)
        model._norm = ops.vector(checkpoint.tensor("norm"))
        model._head = ops.pack_head(in_memory(table))
        return model

    def embed(
        self, ids: Tensor, embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """See `DecoderModel.embed`."""
        return self._ops.embedding(ids, self._table)

    def forward(self, hidden: Tensor, step: Step, caches: Sequence[PagedKV]) -> Tensor:
        """See `DecoderModel.forward`."""
        ops, pages, states = self._ops, iter(caches), iter(step.states)
        for layer in self._layers:
            normed = ops.rms_norm(hidden, layer.norm, _EPS)
            if layer.kind == RECURRENT:
                mixed = self._recur(normed, layer, next(states), step.meta)
            else:
                mixed = self._attend(normed, layer, next(pages), step.meta)
            hidden = hidden + ops.linear(mixed, layer.matrices["output"])
        return ops.rms_norm(hidden, self._norm, _EPS)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel.logits`."""
        return self._ops.linear_float32(hidden, self._head)

    def _recur(self, x: Tensor, layer: _Layer, state: LayerState, meta: AttnMeta) -> Tensor:
        ops, by = self._ops, layer.matrices
        assert layer.taps is not None
        inputs, keep = ops.linear(x, by["inputs"]), torch.sigmoid(ops.linear(x, by["keep"]) + 2)
        last, sums = ops.read_state(state)
        found = torch.zeros_like(inputs)
        for row in range(meta.n):
            first, end = meta.cu_q[row], meta.cu_q[row + 1]
            seen, total = torch.cat([last[row], inputs[first:end]]), sums[row]
            for token in range(first, end):
                window = seen[token - first : token - first + _TAPS]
                total = keep[token] * total + (1 - keep[token]) * (window * layer.taps).sum(0)
                found[token] = total
            last[row], sums[row] = seen[1 - _TAPS :], total
        ops.write_state(state, [last, sums])
        return found * F.silu(ops.linear(x, by["gate"]))

    def _attend(self, x: Tensor, layer: _Layer, cache: PagedKV, meta: AttnMeta) -> Tensor:
        ops = self._ops
        q, k, v = (
            ops.linear(x, layer.matrices[name]).view(-1, _HEADS, _SIZE) for name in ("q", "k", "v")
        )
        ops.kv_write(k, v, cache, meta)
        return ops.paged_attention(q, k, v, cache, meta, scale=_SIZE**-0.5).flatten(1)


def _state(dtype: torch.dtype) -> State:
    """The inputs before a row that its convolution sees, and the recurrence's sums."""
    inputs = StateTensor((_TAPS - 1, _HIDDEN), dtype)
    return State((inputs, StateTensor((_HIDDEN,), torch.float32)))


def read_sizes(checkpoint: Checkpoint) -> TextSizes:
    """The family's configuration."""
    return TextSizes(VOCABULARY, _HIDDEN, len(checkpoint.config["layer_types"]), 1024)


FAMILY = Family(
    architectures=("TinyRecurrentForCausalLM",),
    text_types=(_NAME,),
    decoder=f"{__name__}:RecurrentDecoder",
    config=f"{__name__}:read_sizes",
)


def install(patch: pytest.MonkeyPatch) -> None:
    """The family is found as one of an installed package."""
    point = EntryPoint(name=_NAME, value=f"{__name__}:FAMILY", group=registry.GROUP)
    patch.setattr(registry, "entry_points", lambda group: [point])


def make_recurrent(folder: Path, kinds: Sequence[str] = HYBRID) -> Path:
    """A random checkpoint with these layers, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": list(FAMILY.architectures), "model_type": _NAME}
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": list(kinds)}))
    numbers = torch.Generator().manual_seed(len(kinds))

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=numbers) * scale

    tensors = {"embedding": drawn(VOCABULARY, _HIDDEN), "norm": drawn(_HIDDEN) + 1}
    for number, kind in enumerate(kinds):
        tensors[f"layers.{number}.norm"] = torch.ones(_HIDDEN)
        for name in _MATRICES[kind]:
            tensors[f"layers.{number}.{name}"] = drawn(_HIDDEN, _HIDDEN, scale=2 * _HIDDEN**-0.5)
        if kind == RECURRENT:
            tensors[f"layers.{number}.taps"] = drawn(_TAPS, _HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    return folder


class PlainLoop:
    """The same model without batches, blocks and slots: one sequence, token by token, from its first one."""

    def __init__(self, folder: Path) -> None:
        self._weights = load_file(folder / "model.safetensors")
        self._kinds = json.loads((folder / "config.json").read_text())["layer_types"]

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """The `count` likeliest tokens after a prompt, and the logits [count, vocabulary] that they were chosen
        from."""
        tokens, chosen = list(prompt), []
        memory: list[list[Tensor]] = [[] for _ in self._kinds]
        sums = [torch.zeros(_HIDDEN) for _ in self._kinds]
        for place in range(len(prompt) + count - 1):
            hidden = self._weights["embedding"][tokens[place]]
            for number, kind in enumerate(self._kinds):
                hidden = hidden + self._layer(number, kind, hidden, memory[number], sums)
            if place >= len(prompt) - 1:
                last = self._norm(hidden, self._weights["norm"])
                chosen.append(self._weights["embedding"] @ last)
                tokens.append(int(chosen[-1].argmax()))
        return tokens[len(prompt) :], torch.stack(chosen)

    def _layer(
        self, number: int, kind: str, hidden: Tensor, memory: list[Tensor], sums: list[Tensor]
    ) -> Tensor:
        own = {name: self._weights[f"layers.{number}.{name}"] for name in _MATRICES[kind]}
        x = self._norm(hidden, self._weights[f"layers.{number}.norm"])
        if kind == ATTENTION:
            memory.append(torch.stack([own["k"] @ x, own["v"] @ x]).view(2, _HEADS, _SIZE))
            keys, values = torch.stack(memory, 1)
            scores = torch.einsum("hd,thd->ht", (own["q"] @ x).view(_HEADS, _SIZE), keys)
            weights = (scores * _SIZE**-0.5).softmax(-1)
            return own["output"] @ torch.einsum("ht,thd->hd", weights, values).flatten()
        memory.append(own["inputs"] @ x)
        window = torch.stack([torch.zeros(_HIDDEN)] * (_TAPS - 1) + memory)[-_TAPS:]
        keep = torch.sigmoid(own["keep"] @ x + 2)
        mixed = (window * self._weights[f"layers.{number}.taps"]).sum(0)
        sums[number] = keep * sums[number] + (1 - keep) * mixed
        return own["output"] @ (sums[number] * F.silu(own["gate"] @ x))

    @staticmethod
    def _norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + _EPS) * weight
