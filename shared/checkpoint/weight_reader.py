"""Reads a service's tensors from a checkpoint and logs progress, speed and where the time goes."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.mapped_pages import give_back

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger(__name__)

_SAY_EVERY_S = 2.0
_PAGE_BYTES = 4096
_RESIDENT_BYTES = 32 << 20  # of what was read last; what was read before it is packed by now


class WeightReader:
    """Hands out tensors by name. The time between two of them is the caller's: packing, converting, moving. Of what was
    handed out little stays in the resident set: the rest is read from the file again where somebody looks at it."""

    def __init__(
        self, checkpoint: Checkpoint, names: Iterable[str], say_every_s: float = _SAY_EVERY_S
    ) -> None:
        """`names` are those that will be read: for the share that is shown, and to close a file after its last one, so
        that no more than one shard is mapped beside what was made of it. How far it is is logged once in `say_every_s`.
        """
        self._say_every_s = say_every_s
        self._checkpoint = checkpoint
        names = tuple(names)
        self._total = sum(checkpoint.nbytes(name) for name in names)
        self._left = Counter(map(checkpoint.file_of, names))  # tensors of each file not read yet
        self._seen: dict[str, int] = {}  # bytes of tensors that were read, if only in part
        # What was read last, by names and rows, the oldest first: it keeps files mapped.
        self._resident: dict[tuple[str, int, int], Tensor] = {}
        self._bytes = 0
        self._reading_s = 0.0
        self._began = self._said = time.perf_counter()

    def tensor(self, name: str) -> "Tensor":
        """One tensor, mapped and read from the disk: not to be written to."""
        began = time.perf_counter()
        tensor = self._checkpoint.tensor(name)
        _read(tensor)
        self._count(name, tensor, began)
        self._keep((name, 0, tensor.shape[0] if tensor.ndim else 1), tensor)
        return tensor

    def part(self, name: str, rows: slice, columns: slice) -> "Tensor":
        """Some rows and columns of a matrix, nothing else of which is read: not to be written to."""
        whole = self._checkpoint.shape(name)
        if (rows.start, rows.stop, columns.start, columns.stop) == (0, whole[0], 0, whole[1]):
            return self.tensor(name)
        began = time.perf_counter()
        part = self._checkpoint.part(name, rows, columns)
        if part.is_contiguous():
            _read(part)
        self._count(name, part, began)
        self._keep((name, rows.start, rows.stop), part)
        return part

    def _keep(self, place: tuple[str, int, int], tensor: "Tensor") -> None:
        """What was read before is no longer resident where it is too much together with this."""
        self._resident.pop(place, None)
        self._resident[place] = tensor
        total = sum(map(_spanned, self._resident.values()))
        while total > _RESIDENT_BYTES and len(self._resident) > 1:
            oldest = self._resident.pop(next(iter(self._resident)))
            total -= _spanned(oldest)
            give_back(oldest)

    def _count(self, name: str, tensor: "Tensor", began: float) -> None:
        now = time.perf_counter()
        self._reading_s += now - began
        self._bytes += tensor.nbytes
        if name not in self._seen:
            self._close_if_read(name)
        self._seen[name] = self._checkpoint.nbytes(name)
        if now - self._said >= self._say_every_s:
            self._said = now
            percent = 100 * sum(self._seen.values()) // self._total
            log.info("loading weights", percent=percent, **self._pace(now))

    def _close_if_read(self, name: str) -> None:
        file = self._checkpoint.file_of(name)
        self._left[file] -= 1
        if not self._left[file]:
            self._checkpoint.close_file(file)

    def finish(self) -> None:
        """Logs the totals."""
        for tensor in self._resident.values():
            give_back(tensor)
        self._resident.clear()
        now = time.perf_counter()
        took = now - self._began
        log.info(
            "loaded weights",
            seconds=round(took, 2),
            reading_s=round(self._reading_s, 2),
            packing_s=round(took - self._reading_s, 2),
            **self._pace(now),
        )

    def _pace(self, now: float) -> dict[str, float]:
        gigabytes = self._bytes / 1e9
        return {
            "gb": round(gigabytes, 2),
            "gb_per_s": round(gigabytes / max(now - self._began, 1e-3), 2),
        }


def _read(tensor: "Tensor") -> None:
    """A mapped file is read where it is first looked at: here, and not in the middle of the caller's work."""
    if tensor.numel():
        step = max(1, _PAGE_BYTES // tensor.element_size())
        tensor.view(-1)[::step].clone()


def _spanned(tensor: "Tensor") -> int:
    """Bytes from its first element to its last, those between them that are others' included."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in strides))
