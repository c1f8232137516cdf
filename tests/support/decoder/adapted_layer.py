"""A drawn decoder layer and low-rank additions to any of its linear layers, for the ops of every device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.devices.base.adapters import (
    Addition,
    LayerAdditions,
    LayerLinears,
    LayerSegments,
)
from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.rope import rope_table
from services.decoder.steps.attention_meta import Heads, KVSpec
from shared.model_config.rope import RopeConfig
from shared.weights.linear_weight import in_memory

LINEARS = LayerLinears(96, 200, Heads(4, 2, 64))
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STACKED = ("qkv_proj", "gate_up_proj")
# Tokens of each sequence of a step.
COUNTS = (1, 1, 1, 9, 4)
TOKENS = sum(COUNTS)


@dataclass(frozen=True)
class Drawn:
    """An addition as plain matrices, and which tokens of a step have it."""

    name: str
    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]
    rows: Sequence[int]

    @classmethod
    def of(cls, name: str, rows: Sequence[int], seed: int, rank: int = 5) -> "Drawn":
        """Of the same values for the same seed."""
        numbers, place = torch.Generator().manual_seed(seed), LINEARS.place(name)
        down = torch.randn(rank, place.inputs, generator=numbers) / math.sqrt(place.inputs)
        up = torch.randn(place.last - place.first, rank, generator=numbers)
        return cls(name, down, up, rows)

    def packed(self, ops: BaseOps) -> Addition:
        """For one device."""
        place = LINEARS.place(self.name)
        return ops.pack_addition(place, in_memory(self.down), in_memory(self.up))

    def moved(self, rows: Sequence[int]) -> "Drawn":
        """The same addition for other rows."""
        return Drawn(self.name, self.down, self.up, rows)


class DrawnLayer:
    """Weights of a layer in float32, and the rows of a step."""

    def __init__(self, seed: int = 0) -> None:
        numbers = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=numbers) / math.sqrt(shape[-1])

        hidden, heads = LINEARS.hidden, LINEARS.heads
        self.weights: Mapping[str, Tensor] = {
            "qkv": draw(LINEARS.place("qkv_proj").last, hidden),
            "output": draw(hidden, heads.num_q * heads.size),
            "gate_up": draw(2 * LINEARS.inner, hidden),
            "down": draw(hidden, LINEARS.inner),
        }
        self.norms = [1 + draw(hidden) for _ in range(2)]
        self.normed, self.residual = (
            torch.randn(TOKENS, hidden, generator=numbers) for _ in range(2)
        )

    def packed(self, ops: BaseOps, merged: Sequence[Drawn] = ()) -> DecoderLayer:
        """For one device; with what `merged` add as part of the weights."""
        weights = {name: weight.clone() for name, weight in self.weights.items()}
        for drawn in merged:
            place = LINEARS.place(drawn.name)
            weights[place.product][place.first : place.last] += drawn.up @ drawn.down
        stored = {name: in_memory(weight) for name, weight in weights.items()}
        return DecoderLayer(
            qkv=ops.pack(stored["qkv"]),
            output=ops.pack(stored["output"]),
            post_norm=ops.vector(self.norms[0]),
            gate_up=ops.pack_gate_up(stored["gate_up"]),
            down=ops.pack(stored["down"]),
            after_norm=ops.vector(self.norms[1]),
            heads=LINEARS.heads,
            norms=None,
            scale=LINEARS.heads.size**-0.5,
            window=None,
            eps=1e-5,
        )

    def run(
        self,
        ops: BaseOps,
        layer: DecoderLayer,
        drawn: Sequence[Drawn] = (),
        sequences: Sequence[int] = tuple(range(len(COUNTS))),
    ) -> Tensor:
        """Of some sequences of the step the rows that the layer gives, and their sums so far: [2, tokens, hidden] on
        the host. The sequences begin in this step."""
        counts = [COUNTS[number] for number in sequences]
        tokens = [token for number in sequences for token in tokens_of(number)]
        place_of = {token: place for place, token in enumerate(tokens)}
        spec = KVSpec(LINEARS.heads.num_kv, LINEARS.heads.size, LINEARS.heads.size, ops.dtype)
        kv = ops.alloc_kv(spec, 1 + len(counts))
        table = torch.arange(1, 1 + len(counts), dtype=torch.int32)[:, None].to(ops.device)
        positions = torch.cat([torch.arange(count) for count in counts])
        slots = positions + ops.block_size * torch.arange(1, 1 + len(counts)).repeat_interleave(
            torch.tensor(counts)
        )
        meta = ops.make_meta(counts, counts, table, slots.to(ops.device))
        rope = RopeConfig("default", 1e4, LINEARS.heads.size, LINEARS.heads.size, 64)
        both = ops.rotary_table(*rope_table(rope, 64, ops.dtype, LINEARS.heads.size))
        cos, sin = (values[positions.to(values.device)] for values in both)
        # Segments of the same rows share them, as in a model.
        rows: dict[tuple[int, ...], Tensor] = {}
        additions = []
        of_rows = []
        for one in drawn:
            mine = tuple(place_of[row] for row in one.rows if row in place_of)
            if mine:
                where = rows.setdefault(mine, torch.tensor(mine).to(ops.device))
                of_rows.append(where)
                additions.append(LayerAdditions.of([one.packed(ops)]))
        normed, residual = (
            x[tokens].to(ops.device, ops.dtype, copy=True) for x in (self.normed, self.residual)
        )
        segments = LayerSegments(of_rows, additions) if additions else None
        found = ops.decoder_layer(normed, residual, layer, cos, sin, kv, meta, segments)
        return torch.stack([x.cpu() for x in found])


def check_added(
    layer: DrawnLayer, ops: BaseOps, drawn: Sequence[Drawn], tolerance: float
) -> Tensor:
    """What the ops give with these additions, which is what the reference gives in float32 up to `tolerance` times the
    largest number of it, and not what they give without."""
    plain = BaseOps(torch.device("cpu"), torch.float32)
    found, before = (layer.run(ops, layer.packed(ops), some) for some in (drawn, ()))
    expected = layer.run(plain, layer.packed(plain), drawn)
    error = (found.float() - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
    assert float(error.max()) < tolerance
    assert float((found - before).abs().max()) > 0.1
    return found


def tokens_of(sequence: int) -> range:
    """Those of one sequence in the step."""
    first = sum(COUNTS[:sequence])
    return range(first, first + COUNTS[sequence])
