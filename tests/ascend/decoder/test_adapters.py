"""An NPU adds to linear layers what the reference adds."""

from collections.abc import Sequence
from random import Random

import pytest
import torch

from services.decoder.devices.npu.device import NpuDevice
from tests.support.decoder.adapted_layer import (
    NAMES,
    STACKED,
    TOKENS,
    Drawn,
    DrawnLayer,
    check_added,
)

HALF = torch.float16


@pytest.fixture(scope="module")
def layer() -> DrawnLayer:
    return DrawnLayer()


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    return NpuDevice(HALF)


def check(layer: DrawnLayer, device: NpuDevice, drawn: Sequence[Drawn]) -> None:
    """Within what rounding to eleven bits leaves."""
    with torch.inference_mode():
        check_added(layer, device.ops, drawn, 0.01)


@pytest.mark.parametrize("name", [*NAMES, *STACKED])
def test_one_two_and_three_segments_of_a_row(
    layer: DrawnLayer, device: NpuDevice, name: str
) -> None:
    check(layer, device, [Drawn.of(name, (0, 2, 4, 5, 6, 9), 0)])
    rows = [(0, 1, 4, 5, 6), (0, 3, 4, 9), (0, 5, 9, 11)]
    check(layer, device, [Drawn.of(name, some, i, rank=4 + i) for i, some in enumerate(rows)])


def test_any_linear_layers_together(layer: DrawnLayer, device: NpuDevice) -> None:
    random = Random(1)
    for size in (2, 4, 7, 9):
        names = random.sample([*NAMES, *STACKED], size)
        drawn = [
            Drawn.of(name, sorted(random.sample(range(TOKENS), random.randint(1, 6))), seed)
            for seed, name in enumerate(names)
        ]
        check(layer, device, drawn)
