"""Prometheus metrics under the names of vLLM where they mean the same, so that dashboards and
autoscalers work.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from services.gateway.scheduler_load import SchedulerLoad
from shared.background import failures
from tessera.common.v1.ending_pb2 import Ending, FinishReason

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 80)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600)
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CANCELLED: "abort",
    FinishReason.FINISH_REASON_ERROR: "error",
}


class _BackgroundFailures(Collector):
    """What should be 0."""

    def collect(self) -> Iterator[Metric]:
        """One series for each task that has failed."""
        text = "How often a background task of this gateway failed and was begun again."
        family = CounterMetricFamily("tessera_background_failures", text, labels=["task"])
        for name, count in failures.items():
            family.add_metric([name], count)
        yield family


class Metrics:
    """All series of one gateway, with its own registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.load = SchedulerLoad(model_name)
        self.registry.register(self.load)
        self.registry.register(_BackgroundFailures())
        self._model_name = model_name
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of ended requests."
        )
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens given out.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S
        )
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Between one token and the next.", _ITL_S
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _E2E_S
        )
        self._stages = Histogram(
            "tessera_stage_duration_seconds",
            "Time in each stage of a request.",
            ["stage"],
            buckets=_STAGE_S,
            registry=self.registry,
        )
        self._stage_series: dict[str, Histogram] = {}
        self._rejections = Counter(
            "tessera_rejections",
            "Requests refused before they were accepted, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._resumes = self._counter("tessera_resumes", "Answers that were gone on with.")
        self._known = self._counter(
            "tessera_idempotent_hits", "Requests that came again under their idempotency key."
        )
        self._restores = Counter(
            "tessera_restores",
            "Requests told to a Redis that came back, by whether it took them.",
            ["model_name", "result"],
            registry=self.registry,
        )
        self.first_token = self._ttft.observe
        self.inter_token = self._itl.observe

    def stage(self, name: str, seconds: float) -> None:
        """One stage of one request took this long."""
        series = self._stage_series.get(name)
        if series is None:
            series = self._stage_series[name] = self._stages.labels(name)
        series.observe(seconds)

    def rejected(self, reason: str) -> None:
        """A request was refused before it was accepted."""
        self._rejections.labels(reason.lower()).inc()

    def resumed(self) -> None:
        """A client goes on with an answer, or follows it again."""
        self._resumes.inc()

    def known_again(self) -> None:
        """A request came whose idempotency key is in use."""
        self._known.inc()

    def restored(self, taken: int, refused: int) -> None:
        """Redis came back and was told what this gateway follows."""
        self._restores.labels(self._model_name, "restored").inc(taken)
        self._restores.labels(self._model_name, "refused").inc(refused)

    def ended(
        self,
        ending: Ending | None,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        duration_s: float,
    ) -> None:
        """An accepted request is over; without an ending the client left."""
        reason = "abort" if ending is None else _REASONS.get(ending.reason, "error")
        self._success.labels(self._model_name, reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generation_tokens)
        self._e2e.observe(duration_s)

    def text(self) -> bytes:
        """The page in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, ["model_name"], registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)
