"""Where the time of a decoder's steps went, summed up for dashboards and measurements."""

from services.scheduler.core.plan import StepPlan
from tessera.decoder.v1.decoder_pb2 import StepTimes
from tessera.scheduler.v1 import scheduler_pb2


class StepTotals:
    """Sums in microseconds over steps with rows, by the scheduler's clock and by the decoder's."""

    def __init__(self) -> None:
        self.plan_s = 0.0
        self.log_s = 0.0
        self._steps = 0
        self._tokens = 0
        self._away_s = 0.0  # from sending a plan to its result
        self._step_s = 0.0
        self._queue_us = 0
        self._prepare_us = 0
        self._forward_us = 0
        self._sample_us = 0

    def add(self, plan: StepPlan, away_s: float, step_s: float, times: StepTimes) -> None:
        """A plan was answered, so long after it had been sent, so long after it had begun."""
        if not plan.row_slot:
            return
        self._steps += 1
        self._tokens += plan.num_tokens
        self._away_s += away_s
        self._step_s += step_s
        self._queue_us += times.queue_us
        self._prepare_us += times.prepare_us
        self._forward_us += times.forward_us
        self._sample_us += times.sample_us

    def message(self) -> scheduler_pb2.StepTotals:
        """All of it."""
        there = self._queue_us + self._prepare_us + self._forward_us + self._sample_us
        return scheduler_pb2.StepTotals(
            steps=self._steps,
            tokens=self._tokens,
            plan_us=round(1e6 * self.plan_s),
            log_us=round(1e6 * self.log_s),
            transfer_us=max(0, round(1e6 * self._away_s) - there),
            queue_us=self._queue_us,
            prepare_us=self._prepare_us,
            forward_us=self._forward_us,
            sample_us=self._sample_us,
            step_us=round(1e6 * self._step_s),
        )
