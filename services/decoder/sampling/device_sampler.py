"""The choice of tokens where logits are: `truncation.choose` in plain torch operations, in float32.

Nothing here asks the device for a value, so that steps go on without waiting. Rows are truncated among their largest
logits alone; a row for which these do not suffice says so, and is chosen by the host.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.sampling.truncation import Truncation, choose

# Largest logits of a row among which it is truncated. A top_k has to be less.
CANDIDATES = 1024
_BLOCK = 512  # weights that are summed at a time where a row is not truncated

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Draws:
    """Settings of the samples of a step, and each one's random number. A temperature of 0 takes the largest logit."""

    settings: Truncation
    numbers: Vector

    def packed(self) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        """float32 [5, samples] for `draw`."""
        below_one = np.nextafter(np.float32(1), np.float32(0))
        result = np.empty((5, len(self.numbers)), np.float32)
        result[0], result[1] = self.settings.temperature, self.settings.top_k
        result[2], result[3] = self.settings.top_p, self.settings.min_p
        np.minimum(self.numbers.astype(np.float32), below_one, out=result[4])
        return result

    def choose(self, logits: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", rows: Ids) -> Ids:
        """The tokens int64 [n] of the samples `rows` [n] by the host, from their logits [n, vocabulary]."""
        tokens: Ids = logits.argmax(axis=1)
        warm = np.flatnonzero(
            (self.settings.temperature[rows] > 0) & np.isfinite(logits.max(axis=1))
        )
        if len(warm):
            some = rows[warm]
            tokens[warm] = choose(logits, warm, self.settings.rows(some), self.numbers[some])
        return tokens


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits float32 [samples, vocabulary] the index int32 of each row's largest one, the first of equals, and its
    value; NaN, and any index, if there is one among them."""
    values = logits.amax(-1)
    return (logits == values[:, None]).float().argmax(-1).to(torch.int32), values


def draw(logits: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits float32 [samples, vocabulary] the chosen tokens int32, -1 where the host has to choose, and each row's
    largest logit. `packed`: of `Draws`."""
    temperature, top_k, top_p, min_p, numbers = packed.unbind(0)
    greedy, values = largest(logits)
    warm = torch.where(temperature > 0, temperature, 1.0)
    weights = torch.exp((logits - values[:, None]) / warm[:, None])
    limited = (top_k > 0) | (top_p < 1) | (min_p > 0)
    among = _draw_limited(logits, weights, top_k, top_p, min_p, numbers)
    tokens = torch.where(limited, among, _draw_free(weights, numbers))
    return torch.where(temperature > 0, tokens, greedy).to(torch.int32), values


def _draw_free(weights: Tensor, numbers: Tensor) -> Tensor:
    """Inverts the running sum of all weights: which block, then which place in it."""
    n, vocabulary = weights.shape
    blocks = F.pad(weights, (0, -vocabulary % _BLOCK)).view(n, -1, _BLOCK)
    ends = blocks.sum(-1).cumsum(-1)
    goal = numbers * ends[:, -1]
    block = _first_above(ends, goal, ends > 0)
    before = F.pad(ends, (1, 0)).gather(1, block[:, None])[:, 0]
    part = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0]
    return block * _BLOCK + _first_above(part.cumsum(-1), goal - before, part > 0)


def _draw_limited(
    logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """Truncates each row among its candidates and inverts what is left, in the order of ids."""
    vocabulary = logits.shape[1]
    size = min(CANDIDATES, vocabulary)
    values, ids = _ranked(logits, size)
    ranked = weights.gather(1, ids)
    rank = torch.arange(size, device=logits.device, dtype=torch.float32)
    kept = (ranked >= min_p[:, None]) & ((top_k == 0)[:, None] | (rank < top_k[:, None]))
    only_top_p = (top_k == 0) & (min_p == 0)
    sums = torch.where(kept, ranked, 0.0).cumsum(-1)
    total = torch.where(only_top_p, weights.sum(-1), sums[:, -1])
    before = F.pad(sums, (1, 0))[:, :-1]
    # Where top-p does not limit a row rounding must not either.
    within = (before < (top_p * total)[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    decided = only_top_p | ~kept[:, -1]
    kept = kept & within
    # The last token that is kept lies strictly above all that are no candidates.
    lowest = torch.where(kept, values, torch.inf).amin(-1)
    decided = decided & (lowest > values[:, -1])
    order = _order(ids)
    by_id = torch.where(kept, ranked, 0.0).gather(1, order)
    running = by_id.cumsum(-1)
    place = _first_above(running, numbers * running[:, -1], by_id > 0)
    tokens = ids.gather(1, order.gather(1, place[:, None]))[:, 0]
    return tokens if size == vocabulary else torch.where(decided, tokens, -1)


def _ranked(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, descending, of equal ones the lowest ids first, and their ids."""
    values, ids = logits.topk(size, -1)
    order = _order(ids)
    values, ranks = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order.gather(1, ranks))


def _order(ids: Tensor) -> Tensor:
    """The order that sorts ids: as float32, which holds each of them, for the cores of an NPU sort no integers."""
    return ids.float().argsort(-1)


def _first_above(running: Tensor, goal: Tensor, usable: Tensor) -> Tensor:
    """Of running sums [n, places] the first place above the goal, the last usable one at most: rounding may put the
    goal at the total."""
    places = torch.arange(running.shape[1], device=running.device, dtype=torch.float32)
    last = torch.where(usable, places, 0.0).amax(-1)
    passed = (running <= goal[:, None]).float().sum(-1)
    return torch.minimum(passed, last).long()
