"""What `leaks` calls growth: of processes that stay, and of workers, which come and go."""

import pytest

from benchmarks.system.leaks import Look, judge

MB = 1_000_000


def look(megabytes: float, **types: int) -> Look:
    return Look(int(megabytes * MB), int(megabytes * MB), 0, 0, types)


BEFORE = {
    "preprocess 1": look(100, list=50),
    "preprocess worker 2": look(40),
    "preprocess worker 3": look(60),
    "redis 4": look(10),
}


@pytest.mark.parametrize(
    ("changes", "has_failed"),
    [
        ({}, False),
        ({"redis 4": look(90)}, False),
        ({"preprocess 1": look(106)}, True),
        ({"preprocess 1": look(100, list=151)}, True),
        ({"preprocess 1": None}, True),
        ({"gateway 5": look(1)}, True),
        # Clients that leave end workers, and more requests at a time start some.
        ({"preprocess worker 2": None}, False),
        ({"preprocess worker 9": look(62)}, False),
        ({"preprocess worker 9": look(66)}, True),
        ({"preprocess worker 3": look(66)}, True),
        ({"scheduler worker 9": look(66)}, False),
        ({f"preprocess worker {number}": look(40) for number in (7, 8, 9)}, True),
    ],
)
def test_growth_is_told_from_workers_that_come_and_go(
    changes: dict[str, Look | None], has_failed: bool
) -> None:
    after = {name: found for name, found in {**BEFORE, **changes}.items() if found is not None}
    assert judge(BEFORE, after, most_workers=4) == has_failed
