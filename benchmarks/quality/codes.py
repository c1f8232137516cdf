"""Ways of making codes of 4 bits, beside each other: `codes [MODEL]`.

Weights alone are rounded, and transformers computes in float32 with the numbers that the codes stand for. This says
what codes are worth before any kernel multiplies by them; `quality` says what is served.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.distributions import of_transformers
from benchmarks.quality.divergence import divergence
from benchmarks.quality.text_model.export import CHECKPOINT
from benchmarks.quality.texts import texts_for
from shared.checkpoint.folder import Checkpoint
from shared.weights.linear_weight import in_memory
from shared.weights.on_the_fly import quantize
from shared.weights.scheme import HEAD, Scheme

_TRIES = [1 - 0.04 * i for i in range(10)]  # of a search, parts of the extent

Round = Callable[[Tensor], Tensor]  # [out, inputs] to what its codes stand for


def shipped(scheme: Scheme) -> Round:
    """As `--quantization` makes them."""
    return lambda weight: quantize(in_memory(weight), scheme).dequantize(torch.float32)


def symmetric(group: int, searched: bool = False) -> Round:
    """Codes from -8 to 7 times a scale that has the largest of a group at 7, or the scale with the least squares of
    errors among some smaller ones."""

    def once(rows: Tensor, part: float) -> Tensor:
        scale = rows.abs().amax(-1, keepdim=True) * part / 7
        return (rows / scale.clamp(min=1e-30)).round().clamp(-8, 7) * scale

    return lambda weight: _in_groups(weight, group, once, searched)


def with_zero(group: int, searched: bool = False, whole: bool = True) -> Round:
    """From the least to the largest of a group; the zero point is `whole`, as for integer sums, or any number."""

    def once(rows: Tensor, part: float) -> Tensor:
        least = rows.amin(-1, keepdim=True).clamp(max=0) * part
        extent = rows.amax(-1, keepdim=True).clamp(min=0) * part - least
        scale = (extent / 15).clamp(min=1e-30)
        zero = -least / scale
        if whole:
            zero = zero.round()
        return ((rows / scale + zero).round().clamp(0, 15) - zero) * scale

    return lambda weight: _in_groups(weight, group, once, searched)


def _in_groups(
    weight: Tensor, group: int, once: Callable[[Tensor, float], Tensor], searched: bool
) -> Tensor:
    rows = F.pad(weight, (0, -weight.shape[1] % group)).view(len(weight), -1, group)
    best = once(rows, 1.0)
    for part in _TRIES[1:] if searched else ():
        other = once(rows, part)
        closer = (other - rows).square().sum(-1) < (best - rows).square().sum(-1)
        best = torch.where(closer[..., None], other, best)
    return best.flatten(1)[:, : weight.shape[1]]


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


# Of layers, and of the output matrix.
WAYS: Mapping[str, tuple[Round, Round]] = {
    **{
        f"zero, {group}": (shipped(Scheme(4, group, 2)), shipped(HEAD))
        for group in (32, 64, 128, 256)
    },
    **{f"symmetric, {group}": (symmetric(group), shipped(HEAD)) for group in (32, 64, 128)},
    **{
        f"symmetric, {group}, searched": (symmetric(group, True), shipped(HEAD))
        for group in (32, 64)
    },
    **{f"zero, {group}, searched": (with_zero(group, True), shipped(HEAD)) for group in (32, 64)},
    "any zero, 32": (with_zero(32, whole=False), shipped(HEAD)),
    "zero, 32, output matrix as it is": (shipped(Scheme(4, 32, 2)), _as_it_is),
    "zero, 32, output matrix alike": (shipped(Scheme(4, 32, 2)), shipped(Scheme(4, 32, 2))),
    "output matrix alone, int8": (_as_it_is, shipped(HEAD)),
    "output matrix alone, int4": (_as_it_is, shipped(Scheme(4, 32, 2))),
}


def main(arguments: list[str]) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--tokens", type=int, default=4096, help="places that are compared")
    told = parser.parse_args(arguments)
    checkpoint = Checkpoint(told.model)
    what, texts = texts_for(told.model, told.tokens)
    reference = list(of_transformers(checkpoint, texts))
    print(f"{told.model}: {sum(len(text) - 1 for text in texts)} tokens of {what}")
    for name, (layers, head) in WAYS.items():
        change = _rounded(layers, head)
        found = divergence(texts, reference, list(of_transformers(checkpoint, texts, change)))
        print(f"{name:<36}{found.kl:.4f}", flush=True)


def _rounded(layers: Round, head: Round) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        output = model.get_output_embeddings()
        for module in model.get_decoder().modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = layers(module.weight.data)
        # A matrix of its own: the embedding, which may be the same, stays.
        output.weight = torch.nn.Parameter(head(output.weight.data))

    return change
