"""Captured graphs: kernels kept as closures over device memory, run again at each replay."""

from collections.abc import Callable

from torch import Tensor


def note(again: Callable[[], object], outputs: list[Tensor]) -> None:
    """A kernel has run: `again` computes it once more."""


def refuse_in_capture(what: str) -> None:
    """Raises Refused while a graph is captured: the device cannot wait for the host there."""
