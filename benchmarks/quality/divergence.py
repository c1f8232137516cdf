"""How far distributions of next tokens are from those of a reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Over all places of some texts. `kl`: the mean Kullback-Leibler divergence from the reference, in nats, sum of
    p * log(p / q) with p of the reference; `kl_p99`: below which 99 places of 100 are; `same_top`: the share of places
    with the same most likely token; `loss`: mean nats of the token that is there."""

    kl: float
    kl_p99: float
    same_top: float
    loss: float
    places: int


def divergence(
    texts: Sequence[Sequence[int]], reference: Sequence[Tensor], found: Sequence[Tensor]
) -> Divergence:
    """reference, found: for each text log-probabilities [tokens - 1, vocabulary]."""
    kls, same, losses = [], [], []
    for text, p, q in zip(texts, reference, found, strict=True):
        # Vocabularies may be padded, by each in its own way.
        size = min(p.shape[1], q.shape[1])
        # In float64 their sums are 1, so that no divergence is negative but by rounding.
        p, q = (one[:, :size].double().log_softmax(-1) for one in (p, q))
        kls.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        same.append(p.argmax(-1) == q.argmax(-1))
        losses.append(-q.gather(1, torch.tensor(list(text[1:]))[:, None])[:, 0])
    kl = torch.cat(kls)
    return Divergence(
        kl.mean().item(),
        kl.quantile(0.99).item(),
        torch.cat(same).double().mean().item(),
        torch.cat(losses).mean().item(),
        len(kl),
    )
