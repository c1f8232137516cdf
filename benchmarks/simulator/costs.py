"""What deciding costs on this machine, and what that is made of.

Times are wall times of single calls: a clock of processor time is a call into the kernel, which in a virtual machine
makes what follows it slower than what it measures. A call during which the process lost its core is far off all others
and left out.
"""

import time
from array import array
from typing import Any

import numpy as np

EVERY = 8  # one step and one request in so many is measured
clock = time.perf_counter

_FAR_OFF = 8.0  # times the median distance
_FITS = 3

Floats = np.ndarray[Any, np.dtype[np.float64]]


class RequestCosts:
    """Measured requests: how long hashing, routing and adding to the core took."""

    parts = ("hashing", "routing", "adding")

    def __init__(self) -> None:
        self._seconds = array("d")

    def add(self, hashing: float, routing: float, adding: float) -> None:
        """A request."""
        self._seconds.extend((hashing, routing, adding))

    def extend(self, other: "RequestCosts") -> None:
        """Takes over what another measured."""
        self._seconds.extend(other._seconds)

    def us(self) -> dict[str, float]:
        """Mean of each, in microseconds."""
        times = np.asarray(self._seconds).reshape(-1, len(self.parts))
        if not len(times):
            return dict.fromkeys(self.parts, 0.0)
        means = (1e6 * part[_is_near(part)].mean() for part in times.T)
        return dict(zip(self.parts, map(float, means), strict=True))


class StepCosts:
    """Measured steps: how long plan() and complete() took together, and what was in them."""

    parts = ("a step", "a row that generates", "a row of a prompt", "an ending")

    def __init__(self) -> None:
        self._seconds = array("d")
        self._content = array("i")

    def add(self, seconds: float, generating: int, prompts: int, endings: int) -> None:
        """A step with rows of one token, rows of more, and sequences that ended."""
        self._seconds.append(seconds)
        self._content.extend((1, generating, prompts, endings))

    def extend(self, other: "StepCosts") -> None:
        """Takes over what another measured."""
        self._seconds.extend(other._seconds)
        self._content.extend(other._content)

    def us(self) -> dict[str, float]:
        """Microseconds of each part: the least squares fit."""
        return dict(zip(self.parts, map(float, 1e6 * self._fit()), strict=True))

    def us_of_row(self) -> float:
        """Microseconds of everything, divided by all rows: by sequences and steps."""
        content = self._columns
        rows = content[:, 1:3].sum()
        return float(1e6 * (content @ self._fit()).sum() / max(1.0, rows))

    def _fit(self) -> Floats:
        times, content = np.asarray(self._seconds), self._columns
        near = np.ones(len(times), bool)
        fit = np.zeros(len(self.parts))
        for _ in range(_FITS):
            fit, *_ = np.linalg.lstsq(content[near], times[near], rcond=None)
            near = _is_near(times - content @ fit)
        return fit

    @property
    def _columns(self) -> Floats:
        return np.asarray(self._content, np.float64).reshape(-1, len(self.parts))


def _is_near(values: Floats) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Those that are not much above the others."""
    median = np.median(values)
    above: np.ndarray[Any, np.dtype[np.bool_]] = (
        values <= median + _FAR_OFF * np.median(abs(values - median)) + 1e-9
    )
    return above
