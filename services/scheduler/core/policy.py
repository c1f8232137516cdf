"""Who goes first. A policy is one function from a sequence to a rank: the lowest rank is admitted first, and the
highest gives its blocks up first."""

from collections.abc import Callable

from services.scheduler.core.sequence import Sequence

Policy = Callable[[Sequence], tuple[int, ...]]


def first_come_first_served(sequence: Sequence) -> tuple[int, ...]:
    """By arrival at the queue: a request that comes back from a lost decoder keeps its place."""
    return (sequence.arrival, sequence.choice)


def by_priority(sequence: Sequence) -> tuple[int, ...]:
    """By priority, lower first, and by arrival among equals."""
    return (sequence.priority, sequence.arrival, sequence.choice)


POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served, "priority": by_priority}
