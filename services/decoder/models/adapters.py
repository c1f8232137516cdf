"""An adapter's matrices for the model's linear layers, cut and ordered as a rank and its device have these."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from services.decoder.devices.base.adapters import (
    Addition,
    LayerAdditions,
    LayerLinears,
    LayerSegments,
    LinearPlace,
    require_rows,
)
from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.layer_weights import (
    attended,
    gate_up_order,
    heads,
    own_heads,
    qkv_order,
)
from services.decoder.steps.attention_meta import Heads
from shared.model_config.decoder import DecoderConfig
from shared.weights.linear_weight import LinearWeight

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class Adapter:
    """What is added in each decoder layer: nothing, or to any of its linear layers, to some of them several times."""

    layers: Sequence[LayerAdditions]


class SegmentsOfLayers:
    """What is added in each of `count` layers. What was found last is kept: most steps have the same adapters in the
    same rows as one shortly before."""

    _KEPT = 8

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[tuple[object, ...], Sequence[LayerSegments]] = {}

    def of(self, adapted: Sequence[tuple[Adapter, Tensor]]) -> Sequence[LayerSegments]:
        """For each layer what is added to which rows [n] of a step, one adapter after the other: in every step in the
        same order, since sums are rounded. Raises ValueError for rows that are no segment's."""
        if any(rows.device.type != "cpu" for _, rows in adapted):
            return self._find(adapted)  # to read rows would be to wait for the device
        key = tuple(part for a, rows in adapted for part in (a, rows.numpy().tobytes()))
        found = self._kept.pop(key, None)
        if found is None:
            # The rows' memory is the step's.
            found = self._find([(adapter, rows.clone()) for adapter, rows in adapted])
        self._kept[key] = found
        if len(self._kept) > self._KEPT:
            del self._kept[next(iter(self._kept))]
        return found

    def _find(self, adapted: Sequence[tuple[Adapter, Tensor]]) -> Sequence[LayerSegments]:
        for _, rows in adapted:
            require_rows(rows)
        present = [(adapter, rows) for adapter, rows in adapted if len(rows)]
        of_all = [rows for _, rows in present]
        return [
            LayerSegments(of_all, [adapter.layers[i] for adapter, _ in present])
            for i in range(self._count)
        ]

    def forget(self) -> None:
        """What is kept, with the adapters that it is of."""
        self._kept.clear()


def pack_addition(
    name: str, down: LinearWeight, up: LinearWeight, config: DecoderConfig, ops: BaseOps
) -> Addition:
    """Takes over up(down(x)) as a checkpoint has it for the whole linear layer `name` (`LayerLinears.place`): down
    [rank, inputs], up [outputs, rank], any scale included. Of several ranks this one's share is kept: of its outputs
    where the layer is divided by outputs, else of its inputs, so that each rank has a summand of what is added.

    Raises InvalidRequest for another name, and for matrices that do not fit.
    """
    whole = whole_linears(config).place(name)
    whole.require(down, up)
    own = LayerLinears(config.hidden_size, _inner(config, ops), heads(config, ops)).place(name)
    if whole.product == "qkv":
        up = _heads_of(up, whole, own, config, ops)
    elif name == "gate_up_proj":
        up = ops.share.halves(up.reordered(gate_up_order(config)))
    elif whole.product == "gate_up":
        up = ops.share.outputs(up)
    elif whole.product == "output":
        down = attended(down, config, ops)
    else:
        down = ops.share.inputs(down)
    return ops.pack_addition(own, down, up)


def addition_bytes(rank: int, config: DecoderConfig, ops: BaseOps) -> int:
    """What additions of this rank to all linear layers of a decoder layer take in the model's type."""
    own = LayerLinears(config.hidden_size, _inner(config, ops), heads(config, ops))
    places = [own.place(name) for name in _LINEARS]
    numbers = rank * sum(place.inputs + place.last - place.first for place in places)
    return numbers * ops.dtype.itemsize


def whole_linears(config: DecoderConfig) -> LayerLinears:
    """Those of each decoder layer as a checkpoint has them."""
    all_heads = Heads(config.num_heads, config.num_kv_heads, config.head_size)
    return LayerLinears(config.hidden_size, config.intermediate_size, all_heads)


def _inner(config: DecoderConfig, ops: BaseOps) -> int:
    first, last = ops.share.range(config.intermediate_size)
    return last - first


def _heads_of(
    up: LinearWeight,
    whole: LinearPlace,
    own: LinearPlace,
    config: DecoderConfig,
    ops: BaseOps,
) -> LinearWeight:
    """Of a matrix for all queries, all keys, all values or all three the outputs of this rank's heads, in their order.

    It is cut as the product is, where it has zeros for the outputs that are not its own.
    """
    everything = whole_linears(config).place("qkv_proj")
    if whole != everything:
        # Only what is stored as one may have each key's queries beside it.
        config = replace(config, qkv_by_head=False)
    places = range(whole.first, whole.last)
    spread = up.spread("out", places, everything.last)
    cut = own_heads(spread.reordered(qkv_order(config)), config, ops)
    return cut if whole == everything else cut.shard("out", [(own.first, own.last)])
