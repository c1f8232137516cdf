"""Slots that have several samples in one step."""

from collections import Counter

import numpy as np

from services.decoder.sampling.split import Ids


def repeats(slots: Ids) -> bool:
    """Whether one has more than one."""
    return len(set(slots.tolist())) < len(slots)


def turns(slots: Ids) -> list[Ids]:
    """The places of each slot's first sample, then of each one's second, and so on."""
    seen: Counter[int] = Counter()
    turns: dict[int, list[int]] = {}
    for place, slot in enumerate(slots.tolist()):
        turns.setdefault(seen[slot], []).append(place)
        seen[slot] += 1
    return [np.asarray(places) for places in turns.values()]
