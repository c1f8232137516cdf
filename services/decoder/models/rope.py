"""Rotary positions: one table of cosines and sines for every position a model is served with.

Ops rotate whole heads, in pairs of an element of the first half and one of the second. Where a model rotates other
pairs, or a part of each head, the rows of its query and key matrices are loaded in another order (`head_order`):
scores are the same in any order that queries and keys share.

Frequencies follow `transformers.modeling_rope_utils`, in both spellings of the configuration
(`rope_parameters`, or `rope_theta` with `rope_scaling`). Two kinds there depend on the length of
the running text, which a cache shared between sequences cannot; docs/api.md says what "dynamic" and
"longrope" are here.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model_config.rope import RopeConfig


def rope_table(
    rope: RopeConfig, length: int, dtype: torch.dtype, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, 1, width], the size of a head unless given; the first half of the sines is negated
    (`ops.rope`).

    What is not rotated stands behind what is, in both halves, with cosine 1 and sine 0.
    """
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        angles = positions * _dynamic(rope, length)
        scaling = 1.0
    else:
        frequencies, scaling = _frequencies(rope, length)
        angles = positions * frequencies
    still = (0, ((width or rope.head_size) - rope.size) // 2)
    cos = F.pad(angles.cos() * scaling, still, value=1.0)
    sin = F.pad(angles.sin() * scaling, still)
    table_cos = torch.cat([cos, cos], -1).to(dtype)
    table_sin = torch.cat([-sin, sin], -1).to(dtype)
    return table_cos[:, None], table_sin[:, None]


def head_order(rope: RopeConfig) -> list[int]:
    """Of each place of a head as `rope_table` rotates it, the place where the model has it."""
    size, half = rope.size, rope.size // 2
    first, second = range(half), range(half, size)
    if rope.interleaved:
        first, second = range(0, size, 2), range(1, size, 2)
    middle = size + (rope.head_size - size) // 2
    return [*first, *range(size, middle), *second, *range(middle, rope.head_size)]


def _frequencies(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    if rope.kind == "linear":
        return _plain(rope) / float(rope.parameters["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(rope), 1.0
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "longrope":
        return _longrope(rope, length)
    return _plain(rope), 1.0


def _exponents(rope: RopeConfig) -> Tensor:
    return torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size


def _plain(rope: RopeConfig) -> Tensor:
    return 1.0 / (rope.theta ** _exponents(rope))


def _dynamic(rope: RopeConfig, length: int) -> Tensor:
    """NTK-aware frequencies [length, size / 2], each for a text that ends at its position."""
    factor = float(rope.parameters["factor"])
    longest = rope.max_position_embeddings
    ends = torch.arange(1, length + 1, dtype=torch.float64).clamp(min=longest)
    growth = (factor * ends / longest - (factor - 1)) ** (rope.size / (rope.size - 2))
    bases = (rope.theta * growth).float()[:, None]
    return 1.0 / (bases ** _exponents(rope)[None])


def _llama3(rope: RopeConfig) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between (Llama 3.1)."""
    given = rope.parameters
    factor, low, high = (
        float(given[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    plain = _plain(rope)
    wavelengths = 2 * math.pi / plain
    original = rope.original_length
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    ramp = (original / wavelengths - low) / (high - low)
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, (1 - ramp) * scaled / factor + ramp * scaled, scaled)


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    """Peng et al., 2023."""
    given = rope.parameters
    original = rope.original_length
    factor = float(given.get("factor") or rope.max_position_embeddings / original)
    attention = given.get("attention_factor")
    if attention is None:
        mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            attention = _mscale(factor, 1.0)
    low = _correction(rope, float(given.get("beta_fast") or 32), original)
    high = _correction(rope, float(given.get("beta_slow") or 1), original)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** _exponents(rope)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(attention)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _correction(rope: RopeConfig, rotations: float, original: int) -> float:
    """The dimension that turns `rotations` times within the original length."""
    turns = math.log(original / (rotations * 2 * math.pi))
    return rope.size * turns / (2 * math.log(rope.theta))


def _longrope(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """Ding et al., 2024."""
    given = rope.parameters
    original = rope.original_length
    factor = float(given.get("factor") or rope.max_position_embeddings / original)
    attention = given.get("attention_factor")
    if attention is None:
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        attention = grown
    factors = given["long_factor"] if length > original else given["short_factor"]
    stretch = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (stretch * rope.theta ** _exponents(rope)), float(attention)
