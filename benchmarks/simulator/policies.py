"""Ways to choose a decoder: the real router, and what it is measured against."""

from collections.abc import Callable
from typing import Protocol

from benchmarks.simulator.decoder import SimulatedDecoder
from services.scheduler.core.router import Router
from services.scheduler.core.sequence import Sequence


class Policy(Protocol):
    """What the real router offers."""

    def add(self, link: SimulatedDecoder) -> None: ...
    def choose(self, sequence: Sequence) -> SimulatedDecoder: ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._links: list[SimulatedDecoder] = []
        self._next = 0

    def add(self, link: SimulatedDecoder) -> None:
        """A decoder came into service."""
        self._links.append(link)

    def choose(self, sequence: Sequence) -> SimulatedDecoder:
        """The next one, whatever it holds."""
        self._next += 1
        return self._links[self._next % len(self._links)]


class LeastLoaded:
    """The one with the fewest sequences, of equal ones that with the most free blocks. Looks at all of them."""

    def __init__(self) -> None:
        self._links: list[SimulatedDecoder] = []

    def add(self, link: SimulatedDecoder) -> None:
        """A decoder came into service."""
        self._links.append(link)

    def choose(self, sequence: Sequence) -> SimulatedDecoder:
        """By load alone."""
        return min(
            self._links,
            key=lambda link: (link.core.state.num_sequences, -link.core.state.blocks.num_free),
        )


POLICIES: dict[str, Callable[[], Policy]] = {
    "affinity": Router,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
