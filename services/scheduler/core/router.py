"""Which decoder a sequence goes to."""

from collections.abc import Sequence as Items
from typing import Protocol, TypeVar

from services.scheduler.core.scheduler import Scheduler


class HasCore(Protocol):
    """Something that runs sequences by a `Scheduler`."""

    core: Scheduler


Link = TypeVar("Link", bound=HasCore)


def least_loaded(links: Items[Link]) -> Link:
    """The one with the fewest sequences, of equal ones that with the most free blocks."""
    return min(links, key=_load)


def _load(link: HasCore) -> tuple[int, float]:
    core = link.core
    return (core.num_sequences, -core.blocks.num_free / max(1, core.blocks.num_total))
