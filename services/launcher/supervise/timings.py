"""How long a supervised process may be silent, and when what is done for it is done."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. The last four say when a process that does not answer hangs (`HangDetector`)."""

    # Within which a probe is answered, and within which the next one is after one that was not.
    answer_s: float = 1.0
    late_answer_s: float = 2.0
    # After it is ready, when the one that would replace it is prepared: other services may still be starting.
    prewarm_after_s: float = 2.0
    # Without an answer and without work.
    silence_s: float = 5.0
    # After it is ready, in which silence does not count.
    grace_s: float = 10.0
    # Of processor time, by one thread, without an answer: it will not end.
    computed_s: float = 50.0
    # Without an answer, whatever its threads do.
    longest_s: float = 600.0


USUAL = Timings()
