"""Which process computes on which NPU."""

import pytest

from services.launcher.ascend.placement import place
from shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("devices", "decoders", "ranks", "encoders", "expected"),
    [
        ([0], 1, 1, 1, ([[0]], [[0]])),
        ([0, 1], 1, 1, 1, ([[0]], [[1]])),
        ([4, 5, 6, 7], 2, 1, 1, ([[4], [5]], [[6]])),
        ([0, 1], 2, 1, 1, ([[0], [1]], [[1]])),
        ([0, 1], 3, 1, 0, ([[0], [1], [0]], [])),
        ([0, 1, 2, 3], 1, 2, 3, ([[0, 1]], [[2], [3], [2]])),
        ([0, 1, 2, 3], 2, 2, 1, ([[0, 1], [2, 3]], [[3]])),
    ],
)
def test_devices_are_divided(
    devices: list[int],
    decoders: int,
    ranks: int,
    encoders: int,
    expected: tuple[list[list[int]], list[list[int]]],
) -> None:
    placement = place(devices, decoders, encoders, ranks)
    assert (placement.decoders, placement.encoders) == expected


def test_who_shares_a_device_is_known() -> None:
    assert place([0, 1], 3, 0).sharers == 2
    assert place([0, 1], 2, 1).is_shared_with_encoder
    assert not place([0, 1, 2], 2, 1).is_shared_with_encoder


def test_ranks_share_no_device() -> None:
    with pytest.raises(InvalidRequest, match="need 8 NPUs, and 4 are visible"):
        place([0, 1, 2, 3], 2, 0, ranks=4)
