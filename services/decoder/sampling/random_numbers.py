"""Uniform numbers that depend on (seed, choice, output position, purpose) and on nothing else."""

import numpy as np

U64 = np.ndarray[tuple[int], np.dtype[np.uint64]]

# Why a number is drawn; further purposes are for speculation.
SAMPLE = 0

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniform(
    seeds: U64, choices: U64, positions: U64, purpose: int = SAMPLE
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """One number in [0, 1) for each row, a multiple of 2**-53."""
    mixed = _splitmix64(seeds)
    for part in (choices, positions, np.uint64(purpose)):
        mixed = _splitmix64(mixed ^ part)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: U64) -> U64:
    """Steele, Lea and Flood, 2014: the next output of a generator in this state."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
