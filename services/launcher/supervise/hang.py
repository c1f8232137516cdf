"""Whether a process that has been ready and no longer answers hangs, or only needs longer for an answer.

On a machine with too much to do seconds pass before a process gets a core, and a call that holds the interpreter keeps
all of its threads from answering. Such a process is at work; killed and started again it would be no faster, but lose
what it has, and its start would make the machine slower still.
"""

import asyncio

import structlog

from services.launcher.supervise.timings import USUAL, Timings
from shared.child_process.activity import ProcessActivity

log = structlog.get_logger(__name__)

_LOOKS = 2  # and one before them, not the clock alone: the launcher itself may have been stopped


class HangDetector:
    """Of one run of a process, from when it is ready. Times are the event loop's."""

    def __init__(
        self, name: str, pid: int, patience: float = 1.0, timings: Timings = USUAL
    ) -> None:
        """`patience` multiplies the time without an answer and without work."""
        self._name, self._pid = name, pid
        self._timings = timings
        self._limit_s = timings.silence_s * patience
        self._clock = asyncio.get_running_loop().time
        self._answered_at = self._clock()
        self._counts_from = self._answered_at + timings.grace_s
        self._activity: ProcessActivity | None = None  # while it does not answer
        self._worked_at = 0.0
        self._looks = 0
        self._has_warned = False

    def answered(self) -> None:
        """It has answered a probe."""
        now = self._clock()
        if self._has_warned:
            log.info(f"{self._name} answers again", after_s=round(now - self._answered_at, 1))
        self._answered_at = now
        self._activity = None
        self._has_warned = False

    def cause(self) -> str:
        """Looks at a process that has not answered; not directly after a probe, which would count as work.

        Why it counts as hanging, empty as long as it does not.
        """
        now = self._clock()
        if self._activity is None:
            self._activity, self._looks = ProcessActivity(self._pid), 0
            return ""
        self._looks += 1
        is_busy = self._activity.is_busy()
        if is_busy:
            self._worked_at = now
        silent_s = now - self._answered_at
        computed_s, longest_s = self._timings.computed_s, self._timings.longest_s
        if self._activity.used_since_s >= computed_s:
            return f"a thread has computed for {computed_s:g} s and it has not answered"
        if silent_s >= longest_s:
            return f"it has not answered for {longest_s:.0f} s"
        idle_s = now - max(self._answered_at, self._worked_at, self._counts_from)
        if self._looks >= _LOOKS and idle_s >= self._limit_s:
            return f"it has neither answered nor done anything for {self._limit_s:g} s"
        if is_busy and silent_s >= self._limit_s and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"{self._name} does not answer; its threads are at work, so it is left alone"
            )
        return ""
