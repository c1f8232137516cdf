"""What the steps of a decoder computed and how long they took since it was leased, for dashboards and measurements."""

from bisect import bisect_left
from typing import NamedTuple, Self

from services.scheduler.core.plan import StepPlan
from tessera.decoder.v1.decoder_pb2 import StepTimes
from tessera.scheduler.v1 import scheduler_pb2

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # those of vLLM
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)


class StepSums(NamedTuple):
    """Sums over steps with rows since the lease, or between two moments."""

    steps: int
    tokens: int
    step_s: float
    queue_us: int
    prepare_us: int
    forward_us: int
    sample_us: int

    def __sub__(self, earlier: Self) -> "StepSums":
        return StepSums(
            self.steps - earlier.steps,
            self.tokens - earlier.tokens,
            self.step_s - earlier.step_s,
            self.queue_us - earlier.queue_us,
            self.prepare_us - earlier.prepare_us,
            self.forward_us - earlier.forward_us,
            self.sample_us - earlier.sample_us,
        )


class StepStatistics:
    """Sums and histograms over steps with rows, by the scheduler's clock and by the decoder's."""

    def __init__(self) -> None:
        self.plan_s = 0.0  # spent here on planning
        self.log_s = 0.0  # spent here on the log
        self._steps = 0
        self._round_trip_s = 0.0  # from sending a plan to its result
        self._step_s = 0.0
        self._queue_us = 0
        self._prepare_us = 0
        self._forward_us = 0
        self._sample_us = 0
        self._tokens = [0] * (len(_TOKENS) + 1)
        self._tokens_total = 0
        self._seconds = [0] * (len(_SECONDS) + 1)  # of steps in which sequences decode
        self._seconds_total = 0.0

    def add(self, plan: StepPlan, round_trip_s: float, step_s: float, times: StepTimes) -> None:
        """A plan was answered, so long after it was sent, and so long after it began."""
        if not plan.row_slot:
            return
        self._steps += 1
        self._round_trip_s += round_trip_s
        self._step_s += step_s
        self._queue_us += times.queue_us
        self._prepare_us += times.prepare_us
        self._forward_us += times.forward_us
        self._sample_us += times.sample_us
        self._tokens[bisect_left(_TOKENS, plan.num_tokens)] += 1
        self._tokens_total += plan.num_tokens
        if plan.has_decoding:
            self._seconds[bisect_left(_SECONDS, step_s)] += 1
            self._seconds_total += step_s

    def sums(self) -> StepSums:
        """What there was by now."""
        return StepSums(
            self._steps,
            self._tokens_total,
            self._step_s,
            self._queue_us,
            self._prepare_us,
            self._forward_us,
            self._sample_us,
        )

    def totals(self) -> scheduler_pb2.StepTotals:
        """Where the time went."""
        on_decoder = self._queue_us + self._prepare_us + self._forward_us + self._sample_us
        return scheduler_pb2.StepTotals(
            steps=self._steps,
            tokens=self._tokens_total,
            plan_us=round(1e6 * self.plan_s),
            log_us=round(1e6 * self.log_s),
            transfer_us=max(0, round(1e6 * self._round_trip_s) - on_decoder),
            queue_us=self._queue_us,
            prepare_us=self._prepare_us,
            forward_us=self._forward_us,
            sample_us=self._sample_us,
            step_us=round(1e6 * self._step_s),
        )

    def tokens(self) -> scheduler_pb2.TokenCounts:
        """Tokens of a step."""
        return scheduler_pb2.TokenCounts(
            bounds=_TOKENS, counts=self._tokens, total=self._tokens_total
        )

    def durations(self) -> scheduler_pb2.Durations:
        """Seconds of the steps in which sequences decode: what `--step-target-ms` bounds."""
        return scheduler_pb2.Durations(
            bounds_s=_SECONDS, counts=self._seconds, total_s=self._seconds_total
        )
