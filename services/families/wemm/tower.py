"""WeMM's vision part: Idefics2's tower over pictures of any shape, sixteen patches joined to one row, a separator at
each end (MindIE-LLM, `flash_causal_wemm.py`, `modeling_downsampler.py`, `vision_model.py`)."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from services.families.wemm.sizes import JOINED
from services.families.wemm.vision_config import Downsampling, WeMMVisionConfig
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.devices.base.ops import Packed
from services.vision_encoder.towers.blocks import norm_of, patch_rows, run_blocks
from services.vision_encoder.towers.clip_modules import Table, clip_modules
from services.vision_encoder.towers.clip_tower import clip_blocks

Grid = tuple[int, int]  # rows and columns of patches

# Of the table of separators: what stands before a picture's rows, and what stands behind them.
_BEFORE, _BEHIND = 0, 1
_KNOWN_GRIDS = 16


def wemm_modules(config: WeMMVisionConfig) -> nn.Module:
    """The weights, by the names of checkpoints but for `tower`, `downsampler` and `separators`."""
    tower = clip_modules(config.tower, config.tower.num_layers)
    tower["post_layernorm"] = nn.LayerNorm(config.tower.hidden_size, config.tower.eps)
    down = config.downsampling
    layers: list[nn.Module] = []
    for _ in range(down.depth - 1):
        layers += [nn.Identity(), nn.Linear(down.width, down.width, bias=down.bias)]
    joins = nn.Conv2d(down.inputs, down.width, JOINED, JOINED, bias=down.bias)
    downsampler = {"group_op": joins, "linear_model": nn.ModuleList(layers)}
    return nn.ModuleDict(
        {
            "tower": tower,
            "downsampler": nn.ModuleDict(downsampler),
            "separators": Table(*config.separators),
        }
    )


class WeMMTower:
    """Pictures to rows. Takes the weights away from the modules it is made of."""

    def __init__(self, modules: Any, config: WeMMVisionConfig, device: Device) -> None:
        """modules: those of `wemm_modules`, with the checkpoint's weights."""
        tower, ops = modules.tower, device.ops
        self._device, self._ops, self._config = device, ops, config.tower
        self._patches = ops.pack(tower.embeddings.patch_embedding)
        self._positions = tower.embeddings.position_embedding.weight
        self._blocks = clip_blocks(ops, tower.encoder.layers, config.tower)
        self._norm = norm_of(tower.post_layernorm)
        self._down = _downsampler(modules.downsampler, config.downsampling, device)
        self._marks = modules.separators.weight
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


def _downsampler(modules: Any, config: Downsampling, device: Device) -> list[Packed]:
    """Its convolution, over rows of the values of sixteen patches, and the perceptron behind it."""
    joins = modules.group_op
    by_patch = joins.weight.data.permute(0, 2, 3, 1).contiguous()
    joins.weight = nn.Parameter(by_patch, requires_grad=False)
    layers = [joins, *modules.linear_model[1::2]]
    activations = [config.activation] * (len(layers) - 1) + [""]
    pairs = zip(layers, activations, strict=True)
    return [device.ops.pack(layer, activation=activation) for layer, activation in pairs]


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
