"""Which elements of keys are too large for codes of 8 bits beside the others, as a checkpoint's weights tell.

Biases of keys may be a hundred times larger than what the text adds to them (Qwen2). With one scale for a whole key
they would leave nothing of the rest. A rotation mixes pairs of elements, so both of a pair count.
"""

from collections.abc import Iterable

from torch import Tensor

LARGE_BIAS = 8.0

Kept = tuple[tuple[int, ...], ...]


def kept_elements(bias: Tensor | None, num_heads: int, partners: Iterable[str] = ("half",)) -> Kept:
    """Of each head those that are to be kept beside codes, for the bias [num_heads * D] of its keys; empty where none
    are. partners: in which pairs elements may be rotated, `half` a head apart or `next` to each other."""
    if bias is None:
        return ()
    large = bias.detach().float().abs().view(num_heads, -1) > LARGE_BIAS
    size = large.shape[1]
    kept = large.clone()
    if "half" in partners and size % 2 == 0:
        kept |= large.roll(size // 2, 1)
    if "next" in partners and size % 2 == 0:
        kept |= large.view(num_heads, -1, 2).flip(-1).reshape(num_heads, size)
    if not kept.any():
        return ()
    return tuple(tuple(head.nonzero()[:, 0].tolist()) for head in kept)
