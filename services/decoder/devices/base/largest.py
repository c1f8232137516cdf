"""The largest logit of each row."""

import torch
from torch import Tensor


def first_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [rows, vocabulary] the index [rows] of the largest, the first of equals, and its value
    [rows], NaN if there is one among them."""
    values, _ = logits.max(-1)
    # torch's own index may be that of any of equals.
    return (logits == values[:, None]).to(torch.uint8).argmax(-1), values
