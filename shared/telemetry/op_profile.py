"""Calls, time and bytes of the ops of a service that computes, by their names."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from shared.telemetry import diagnostics

log = structlog.get_logger(__name__)


@dataclass
class OpTotal:
    """What the calls of one op took; `nbytes`: of weights, rows and cache that they read and wrote."""

    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0


class OpProfile:
    """Measures methods of an object from its making on. An op that another one calls counts as a part of that one.

    Used by the one thread that computes; `table` and `log_and_clear` may be called on any.
    """

    def __init__(
        self,
        ops: object,
        names: Iterable[str],
        count_bytes: Callable[[str, tuple[Any, ...], Any], int],
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """count_bytes: of a call, by the op's name, its arguments and its result. synchronize: waits for the device;
        called after each op, so that a step takes longer than without a profile."""
        self.totals: dict[str, OpTotal] = {}
        self._count_bytes, self._synchronize = count_bytes, synchronize
        self._inside = False  # an op
        for name in names:
            setattr(ops, name, partial(self._measured, name, getattr(ops, name)))

    def clear(self) -> None:
        """Begins anew."""
        self.totals = {}

    def table(self, seconds: float) -> str:
        """The totals as text, the longest first; `seconds`: of everything, the ops included."""
        lines = [f"{'op':<16}{'calls':>8}{'ms':>11}{'share':>8}{'GB':>9}{'GB/s':>8}"]
        ordered = _longest_first(self.totals)
        rest = seconds - _sum(self.totals).seconds
        for name, total in (*ordered, ("outside of ops", OpTotal(0, rest, 0))):
            lines.append(
                f"{name:<16}{total.calls:>8}{1000 * total.seconds:>11.2f}{total.seconds / seconds:>8.1%}"
                f"{total.nbytes / 1e9:>9.3f}{_rate(total):>8.1f}"
            )
        return "\n".join([*lines, f"{'total':<24}{1000 * seconds:>11.2f}"])

    def log_and_clear(self) -> None:
        """Logs a line for each op, the longest first, and one for their total; then begins anew."""
        totals, self.totals = self.totals, {}
        for name, total in (*_longest_first(totals), ("total", _sum(totals))):
            log.info(
                "op profile",
                op=name,
                calls=total.calls,
                ms=round(1000 * total.seconds, 2),
                gb=round(total.nbytes / 1e9, 3),
                gb_per_s=round(_rate(total), 1),
            )

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Inside of it each diagnostics signal, and at last its end, logs what there is since the one before."""
        try:
            with diagnostics.answering(self.log_and_clear):
                yield
        finally:
            self.log_and_clear()

    def _measured(self, name: str, op: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._inside:
            return op(*given, **named)
        self._inside = True
        began = time.perf_counter()
        try:
            result = op(*given, **named)
            self._synchronize()
        finally:
            self._inside = False
        total = self.totals.setdefault(name, OpTotal())
        total.seconds += time.perf_counter() - began
        total.calls += 1
        total.nbytes += self._count_bytes(name, given, result)
        return result


def _longest_first(totals: dict[str, OpTotal]) -> list[tuple[str, OpTotal]]:
    return sorted(totals.items(), key=lambda item: -item[1].seconds)


def _sum(totals: dict[str, OpTotal]) -> OpTotal:
    found = list(totals.values())
    return OpTotal(
        sum(total.calls for total in found),
        sum(total.seconds for total in found),
        sum(total.nbytes for total in found),
    )


def _rate(total: OpTotal) -> float:
    return total.nbytes / total.seconds / 1e9 if total.seconds > 0 else 0.0
