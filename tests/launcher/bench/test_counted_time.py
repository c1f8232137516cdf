"""Counting processor time of functions: nothing else changes, and a call within another is that one's."""

import asyncio
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.system import counted_time
from benchmarks.system.counted_time import KINDS

SOURCE = """
import asyncio

class Work:
    async def all(self, fails=False):
        first = self.part()
        await asyncio.sleep(0)
        if fails:
            raise KeyError(first)
        return first, sum(self.parts())

    def part(self):
        return 1

    def parts(self):
        yield 2
        yield 3
"""


async def test_calls_and_steps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_time, "FOLDER", str(tmp_path))
    monkeypatch.setattr(counted_time, "_pages", counted_time._Pages())
    module = ModuleType("counted")
    exec(SOURCE, vars(module))
    counted_time.count(vars(module), "metrics")
    work = module.Work()
    for _ in range(2):
        assert work.part() == 1
    assert await work.all() == (1, 5)
    with pytest.raises(KeyError):
        await work.all(fails=True)
    left = asyncio.create_task(work.all())
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    page = np.fromfile(tmp_path / str(os.getpid()), np.float64)
    seconds, calls = page[2 * KINDS.index("metrics") :][:2]
    assert calls == 2 + 3 * 2  # twice a call, three times two steps
    assert 0 < seconds < 60
    assert page[2 * KINDS.index("timelines") + 1] == 0
