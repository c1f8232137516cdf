"""The ranks that compute one model together, as one of them calls the others.

Every rank makes the same calls in the same order, each with its part of the same step.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from services.decoder.ranks.share import Share
from shared.errors import Unavailable
from shared.settings import listed_in_environment, set_process_environment

T = TypeVar("T")

_LOADING_S = 600.0  # that one rank may load longer than another
_CALL_S = 60.0  # that one may come later to a call than another
# By HCCL, which gives up by itself after one of these, and then says why: torch has to wait longer than both.
_HCCL_TIMEOUTS = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
_LONGER_S = 60.0
_HOST_BACKEND = "gloo"

# Newer versions of torch have another name for it, and warn of the old one.
_gather: Callable[[Tensor, Tensor], object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)


class RankLost(Unavailable):
    """Another rank did not take part in a call."""


class RankGroup:
    """Of `share.size` ranks this one is number `share.rank`. `calls`: how many calls with tensors it has made."""

    def __init__(
        self,
        share: Share,
        backend: str,
        on_host: dist.ProcessGroup | None = None,
        store: FileStore | None = None,
    ) -> None:
        """backend: of torch.distributed; on_host: the same ranks, as they reach each other without their devices, where
        that is not the default group; store: for `settle`."""
        self.share = share
        self.calls = 0
        self._on_host = on_host
        self._store = store
        self._settled = 0
        # Gloo adds up in an order that depends on an element's place in the batch, which two summands do not show.
        self._in_order = backend == _HOST_BACKEND and share.size > 2

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' rows [T, H], which it may overwrite: equal bits on every rank."""
        if not self._in_order:
            _complete(lambda: dist.all_reduce(x))
            self.calls += 1
            return x
        parts = self._collect(x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def join(self, logits: Tensor, total: int) -> Tensor:
        """[rows, total] of each rank's columns, as `Share.outputs` divides them."""
        most = -(-total // self.share.size)
        parts = self._collect(F.pad(logits, (0, most - logits.shape[1])))
        return torch.cat(list(parts), 1)[:, :total]

    def largest(self, ids: Tensor, values: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Of each row's `total` logits the index [rows] of the largest, the first of equals, and its value, NaN if
        there is one: from those of each rank's own columns. Every rank gets the same."""
        first, _ = self.share.range(total)
        own = torch.stack((ids.to(torch.int32) + first, values.float().view(torch.int32)))
        parts = self._collect(own)
        found, each = parts[:, 0], parts[:, 1].view(torch.float32)
        best = each.amax(0)
        # Of NaN nothing is found: some id that there is.
        return torch.where(each == best, found, total - 1).amin(0), best

    def least(self, *numbers: int) -> list[int]:
        """Of each number the smallest that a rank gives. Waits for the other ranks' hosts, not for devices."""
        found = torch.tensor(numbers, dtype=torch.int32)
        _complete(lambda: dist.all_reduce(found, dist.ReduceOp.MIN, group=self._on_host))
        return [int(number) for number in found.tolist()]

    def agree(self, fine: bool) -> bool:
        """Whether every rank says so."""
        return bool(self.least(int(fine))[0])

    def settle(self) -> None:
        """Until every rank has made this call, however much longer than another one of them has loaded before."""
        assert self._store is not None
        self._settled += 1
        _settle(self._store, self.share, self._settled)

    def wait(self) -> None:
        """Until every rank has made this call."""
        self.least(0)

    def _collect(self, x: Tensor) -> Tensor:
        """Every rank's tensor [..., N], one behind the other: [ranks, ..., N]."""
        x = x.contiguous()
        parts = x.new_empty((self.share.size * x.shape[0], *x.shape[1:]))
        _complete(lambda: _gather(parts, x))
        self.calls += 1
        return parts.view(self.share.size, *x.shape)


def connect(share: Share, backend: str, meeting: Path) -> RankGroup:
    """Waits until all ranks have started; they find each other by the file `meeting`. One group for each process.
    Raises RankLost."""
    set_process_environment(GLOO_SOCKET_IFNAME="lo")  # all are on this machine
    store = FileStore(str(meeting), share.size)
    _settle(store, share, 0)
    patience = timedelta(seconds=patience_s(backend))
    _complete(
        lambda: dist.init_process_group(
            backend,
            store=store,
            rank=share.rank,
            world_size=share.size,
            timeout=patience,
        )
    )
    if backend == _HOST_BACKEND:
        return RankGroup(share, backend, store=store)
    on_host_patience = timedelta(seconds=_CALL_S)
    on_host = _complete(lambda: dist.new_group(backend=_HOST_BACKEND, timeout=on_host_patience))
    return RankGroup(share, backend, on_host, store)


def patience_s(backend: str) -> float:
    """Seconds after which torch gives up a call of this backend."""
    if backend != "hccl":
        return _CALL_S
    given = [listed_in_environment(name, 0) for name in _HCCL_TIMEOUTS]
    return max([_LOADING_S, *(float(text) for text in given if text.isdecimal())]) + _LONGER_S


def _settle(store: FileStore, share: Share, number: int) -> None:
    store.set(f"{number} of {share.rank}", "")
    others = [f"{number} of {rank}" for rank in range(share.size)]
    _complete(lambda: store.wait(others, timedelta(seconds=_LOADING_S)))


def disconnect() -> None:
    """Leaves the group of `connect`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _complete(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:
        raise RankLost("RANK_LOST", f"the ranks do not reach each other: {error}") from error
