"""Tensors that are read when they are asked for, as `from_pretrained` of transformers takes them."""

import threading
from collections.abc import Callable

from torch import Tensor

from shared.errors import InvalidRequest


class Asked:
    """A tensor that is read when it is indexed with `...`."""

    def __init__(self, reads: "Reads", read: Callable[[], Tensor]) -> None:
        self._reads, self._read = reads, read

    def __getitem__(self, place: object) -> Tensor:
        """All of it."""
        return self._reads.now(self._read)


class Reads:
    """Reads one tensor at a time, whichever thread asks: files are opened and closed meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: InvalidRequest | None = None  # the first that was met

    def now(self, read: Callable[[], Tensor]) -> Tensor:
        """What `read` gives. An error is kept."""
        with self._lock:
            try:
                return read()
            except InvalidRequest as error:
                self.error = self.error or error
                raise
