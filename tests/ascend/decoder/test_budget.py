"""Each term of what a decoder may take for its cache, on devices of real sizes."""

import json
from functools import cache
from typing import Any

import pytest

from shared.hardware import host_memory
from tests.ascend.environment import npu_environment
from tests.ascend.programs.budget import CASES, MIB, OUTSIDE, PARTS, WEIGHTS
from tests.ascend.support import run_python

GIB = 1 << 30
_PROGRAM = "import runpy; runpy.run_module('tests.ascend.programs.budget', run_name='__main__')"
_SEGMENT = 20 * MIB  # what torch's pool may keep beside tensors
_DEVICES = [("910B3", 64 * GIB), ("910B4", 16 * GIB), ("310P3", 24 * GIB)]


@cache
def budgets(npu: str, hbm_bytes: int, foreign: int = 0) -> dict[str, Any]:
    environment = npu_environment(npu, hbm_bytes=hbm_bytes)
    environment["FAKE_NPU_FOREIGN_BYTES"] = str(foreign)
    found: dict[str, Any] = json.loads(run_python(_PROGRAM, environment).splitlines()[-1])
    return found


@pytest.mark.parametrize(("npu", "hbm_bytes"), _DEVICES)
def test_every_term_counts_once(npu: str, hbm_bytes: int) -> None:
    found = budgets(npu, hbm_bytes)
    assert found["total"] == hbm_bytes
    assert found["weights"] == WEIGHTS
    assert found["step"] == pytest.approx(PARTS[0], abs=MIB)  # what came later fits where that was
    for (share, sharers, reserved), budget in zip(CASES, found["budgets"], strict=True):
        kept = max(GIB, 0.03 * hbm_bytes) if reserved is None else reserved
        outside = found["cann"] + OUTSIDE
        left = hbm_bytes * (share or 0.9) / sharers - WEIGHTS - PARTS[0] - outside - kept
        expected = left / 2 if npu == "310P3" else left
        assert budget == pytest.approx(expected, abs=MIB), (share, sharers, reserved)
    before, after = found["unused"]
    assert before > 60 * MIB and after < _SEGMENT  # others on the device may have it


@pytest.mark.parametrize(("npu", "hbm_bytes"), _DEVICES[1:])
def test_blocks_take_what_is_counted(npu: str, hbm_bytes: int) -> None:
    """Heads of 80 elements too, which are wider in the cache."""
    found = budgets(npu, hbm_bytes)
    for counted, taken in found["blocks"]:
        assert counted == taken


def test_pinned_memory_is_divided() -> None:
    """By those who share the host; none on a 310P."""
    alone, two, many = budgets("910B4", 16 * GIB)["swapped"]
    tenth = host_memory.available_bytes() / 10
    assert alone == pytest.approx(min(tenth, 4 * GIB), rel=0.5)
    assert two == pytest.approx(min(tenth / 2, 4 * GIB), rel=0.5)
    assert many == pytest.approx(tenth / (1 << 20), rel=0.5)
    assert budgets("310P3", 24 * GIB)["swapped"] == [0, 0, 0]


def test_memory_of_others_is_left_to_them() -> None:
    """Half of it is taken: a single decoder asks for more, and one of two for less."""
    alone, one_of_two = budgets("910B3", 64 * GIB, foreign=34 * GIB)["refusals"]
    assert not one_of_two
    assert "30.0 of 64.0 GiB" in alone and "asks for 57.6 GiB" in alone
    assert alone.endswith("at most --gpu-memory-utilization 0.46")
