"""Who goes first. A policy is one function from a sequence to a rank; the lowest rank goes first."""

from services.scheduler.core.sequence import Sequence


def first_come_first_served(sequence: Sequence) -> tuple[int, int]:
    """By priority, then by arrival at the queue: a request that comes back from a lost decoder keeps its place."""
    return (-sequence.priority, sequence.arrival)
