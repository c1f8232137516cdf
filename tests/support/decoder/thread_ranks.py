"""Ranks that are threads of one process, for what does not need processes: their calls meet at a barrier."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from services.decoder.ranks.rank_group import RankGroup
from services.decoder.ranks.share import Share

T = TypeVar("T")


class Meeting:
    """Where the threads of `size` ranks hand over their tensors."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadRanks(RankGroup):
    """Sums in the order of ranks."""

    def __init__(self, share: Share, meeting: Meeting) -> None:
        super().__init__(share, "gloo")
        self._in_order = True
        self._meeting = meeting

    def settle(self) -> None:
        """See `RankGroup.settle`."""
        self._meeting.barrier.wait()

    def least(self, *numbers: int) -> list[int]:
        """See `RankGroup.least`."""
        return [int(number) for number in self._meet(torch.tensor(numbers)).amin(0)]

    def _collect(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self._meet(x)

    def _meet(self, x: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.given[self.share.rank] = x.clone()
        meeting.barrier.wait()
        found = torch.stack([part for part in meeting.given if part is not None])
        meeting.barrier.wait()
        return found


def run_ranks(size: int, work: Callable[[ThreadRanks], T]) -> Sequence[T]:
    """What `work` gives for each of `size` ranks, all at the same time."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        with torch.inference_mode():
            try:
                return work(ThreadRanks(Share(rank, size), meeting))
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
