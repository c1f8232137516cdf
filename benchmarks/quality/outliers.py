"""How uneven a model's channels are, which is what makes it hard to quantize: `outliers [MODEL]`."""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.distributions import of_transformers
from benchmarks.quality.text_model.export import CHECKPOINT
from benchmarks.quality.texts import texts_for
from shared.checkpoint.folder import Checkpoint


def main(arguments: list[str]) -> None:
    """Prints for each kind of linear layer, over all layers: of its inputs the largest channel's root mean square
    beside the median channel's, and the largest element beside the root mean square of all; of its weights the largest
    element of an output beside that output's root mean square, the median and the largest of all outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--tokens", type=int, default=2048)
    told = parser.parse_args(arguments)
    _, texts = texts_for(told.model, told.tokens)
    squares: dict[str, Tensor] = {}
    largest: dict[str, float] = defaultdict(float)
    counted: dict[str, int] = defaultdict(int)
    weights: dict[str, Tensor] = {}

    def watch(model: Any) -> None:
        for name, module in model.get_decoder().named_modules():
            if isinstance(module, torch.nn.Linear):
                weights[name] = module.weight.data
                module.register_forward_pre_hook(
                    lambda _, inputs, name=name: note(name, inputs[0].flatten(0, -2))
                )

    def note(name: str, rows: Tensor) -> None:
        squares[name] = squares.get(name, torch.zeros(rows.shape[1])) + rows.square().sum(0)
        largest[name] = max(largest[name], rows.abs().max().item())
        counted[name] += len(rows)

    for _ in of_transformers(Checkpoint(told.model), texts, watch):
        pass
    print("| | channel, largest to median | element to mean | weight to mean, median | largest |")
    print("|---|---|---|---|---|")
    for kind in dict.fromkeys(name.rpartition(".")[2] for name in squares):
        names = [name for name in squares if name.endswith(f".{kind}")]
        channels, elements, outputs = [], [], []
        for name in names:
            mean = (squares[name] / counted[name]).sqrt()
            channels.append((mean.max() / mean.median()).item())
            elements.append(largest[name] / mean.square().mean().sqrt().item())
            weight = weights[name]
            outputs.append(weight.abs().amax(1) / weight.square().mean(1).sqrt())
        ratios = torch.cat(outputs)
        print(
            f"| {kind} | {max(channels):.1f} | {max(elements):.0f}"
            f" | {ratios.median():.1f} | {ratios.max():.1f} |"
        )
