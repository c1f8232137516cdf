"""WeMM's vision part: Idefics2's tower over pictures of any shape, sixteen patches joined to one row, a separator at
each end (MindIE-LLM, `flash_causal_wemm.py`, `modeling_downsampler.py`, `vision_model.py`)."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from services.families.wemm.sizes import JOINED
from services.families.wemm.vision_config import Downsampling, WeMMVisionConfig
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.devices.base.ops import Packed, TowerOps
from services.vision_encoder.towers.blocks import load_norm, patch_rows, run_blocks
from services.vision_encoder.towers.clip_tower import clip_blocks, clip_patches, clip_positions
from shared.weights.named_weights import NamedWeights

Grid = tuple[int, int]  # rows and columns of patches

# Of the table of separators: what stands before a picture's rows, and what stands behind them.
_BEFORE, _BEHIND = 0, 1
_KNOWN_GRIDS = 16


class WeMMTower:
    """Pictures to rows."""

    def __init__(self, weights: NamedWeights, config: WeMMVisionConfig, device: Device) -> None:
        """weights: tensors `tower`.X, `downsampler`.X and `separators`.weight."""
        tower, ops = config.tower, device.ops
        self._device, self._ops, self._config = device, ops, tower
        self._patches = clip_patches(weights, tower, ops)
        self._positions = clip_positions(weights, tower, ops)
        self._blocks = clip_blocks(weights, tower, tower.num_layers, ops)
        self._norm = load_norm(weights, "tower.post_layernorm", tower.hidden_size, tower.eps, ops)
        self._down = _downsampler(weights, config.downsampling, ops)
        self._marks = ops.vector(weights.take("separators.weight", *config.separators))
        self._buckets = config.tower.image_size // config.tower.patch_size

    def __call__(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Rows [rows + 2, width] of each picture [1, 3, height, width] of whole patches."""
        config, ops = self._config, self._ops
        patch = config.patch_size
        grids = [(picture.shape[2] // patch, picture.shape[3] // patch) for picture in pictures]
        lengths = [prod(grid) for grid in grids]
        starts = [0, *accumulate(lengths)]
        places, joined = self._device.upload(
            torch.cat([_position_ids(grid, self._buckets) for grid in grids]),
            torch.cat([_squares(grid) + start for grid, start in zip(grids, starts, strict=False)]),
        )
        values = torch.cat([patch_rows(picture, patch)[0] for picture in pictures])
        x = ops.linear(values, self._patches)
        x += self._positions.index_select(0, places)
        segments = ops.segments(lengths, config.num_heads, config.hidden_size // config.num_heads)
        shared = [segments] * len(self._blocks)
        states = run_blocks(ops, self._blocks, x, config.num_heads, shared)
        rows = ops.norm(states[len(self._blocks)], self._norm)
        rows = rows.index_select(0, joined).view(len(joined) // JOINED**2, -1)
        for layer in self._down:
            rows = ops.linear(rows, layer)
        counts = [len(_squares(grid)) // JOINED**2 for grid in grids]
        before, behind = self._marks[_BEFORE, None], self._marks[_BEHIND, None]
        return [torch.cat([before, some, behind]) for some in torch.split(rows, counts)]


def _downsampler(weights: NamedWeights, config: Downsampling, ops: TowerOps) -> list[Packed]:
    """Its convolution, over rows of the values of sixteen patches, and the perceptron behind it."""
    inputs, width, bias = config.inputs, config.width, config.bias
    kernel = (inputs, JOINED, JOINED)
    joins = weights.take_convolution("downsampler.group_op", width, *kernel, bias=bias)
    # Stored are each channel's patches; a row has each patch's channels.
    by_patch = np.arange(joins.inputs).reshape(-1, inputs).T.flatten()
    layers = [joins.spread("in", by_patch.tolist(), joins.inputs)]
    for i in range(1, 2 * config.depth - 1, 2):
        layers.append(weights.take_linear(f"downsampler.linear_model.{i}", width, width, bias))
    activations = [config.activation] * (len(layers) - 1) + [""]
    pairs = zip(layers, activations, strict=True)
    return [ops.pack(layer, activation) for layer, activation in pairs]


@lru_cache(_KNOWN_GRIDS)
def _position_ids(grid: Grid, buckets: int) -> Tensor:
    """Which entry [rows * columns] of the table each patch takes: it is spread over `buckets` in both directions.

    In float32, as Idefics2 had it before transformers 5: the sums decide between neighbours.
    """
    edges = torch.arange(1 / buckets, 1.0, 1 / buckets)

    def places(count: int) -> Tensor:
        shares = torch.arange(0, 1 - 1e-6, 1 / count)
        return torch.bucketize(shares, edges, right=True, out_int32=True)

    rows, columns = map(places, grid)
    return (rows[:, None] * buckets + columns).flatten()


@lru_cache(_KNOWN_GRIDS)
def _squares(grid: Grid) -> Tensor:
    """Patches [squares * JOINED^2] of each square, line by line; the last ones stand again where a picture's patches do
    not fill it."""
    down, across = (
        torch.arange(-(-count // JOINED) * JOINED, dtype=torch.int32).clamp(max=count - 1)
        for count in grid
    )
    patches = down[:, None] * grid[1] + across
    apart = patches.unflatten(0, (-1, JOINED)).unflatten(2, (-1, JOINED))
    found: Tensor = apart.transpose(1, 2).flatten()
    return found
