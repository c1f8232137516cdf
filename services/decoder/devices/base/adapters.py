"""Low-rank additions to linear layers, as the ops see them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.decoder.devices.base.attention_meta import Packed


@dataclass(frozen=True)
class Segment:
    """Rows of a step whose results gain up(down(x)) (LoRA: Hu et al., 2021); a scale is part of `up`."""

    rows: Tensor  # int64 [n], ascending
    down: Packed  # [rank, inputs]
    up: Packed  # [outputs, rank]


@dataclass(frozen=True)
class LayerSegments:
    """What is added in one decoder layer. Of each linear layer no two segments have a row in common, and `gate` and
    `up` have the same rows."""

    qkv: Sequence[Segment]
    output: Sequence[Segment]
    gate: Sequence[Segment]
    up: Sequence[Segment]
    down: Sequence[Segment]
