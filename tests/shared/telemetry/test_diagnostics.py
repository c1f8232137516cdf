"""A process reports its memory and objects on a signal."""

import asyncio
import json
import os
from functools import partial
from pathlib import Path

from shared.telemetry import diagnostics


class Kept:
    """Something of which there are many."""

    def __init__(self) -> None:
        self.itself = self  # for the collector alone to find


async def counts_of(folder: Path) -> dict[str, int]:
    """How many objects of each type there are."""
    path = folder / f"{os.getpid()}.json"
    path.unlink(missing_ok=True)
    os.kill(os.getpid(), diagnostics.SIGNAL)
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.01)
    report = json.loads(path.read_text())
    assert 0 < report["used_bytes"] <= report["rss_bytes"] + (1 << 20) and report["blocks"] > 0
    types: dict[str, int] = report["types"]
    return types


async def test_objects_that_are_still_referenced_are_counted(tmp_path: Path) -> None:
    name = f"{Kept.__module__}.{Kept.__qualname__}"
    with diagnostics.answering(partial(diagnostics.write_report, tmp_path)):
        assert name not in await counts_of(tmp_path)
        held = [Kept() for _ in range(300)]
        assert (await counts_of(tmp_path))[name] == len(held)
        del held[100:]
        assert (await counts_of(tmp_path))[name] == 100
