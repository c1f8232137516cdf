"""What the schedulers say of their decoders, as series of the metrics page."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad, GetLoadResponse


class SchedulerLoad(Collector):
    """What the schedulers published in Redis. The same at every gateway: take the maximum over
    gateways, not the sum.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._decoders: list[DecoderLoad] = []
        self._live_requests = 0

    def update(self, loads: Sequence[GetLoadResponse], live_requests: int) -> None:
        """Keeps what was read just now. `live_requests` counts all that are reserved, waiting or
        running.
        """
        self._decoders = [decoder for load in loads for decoder in load.decoders]
        self._live_requests = live_requests

    def collect(self) -> Iterable[Metric]:
        """The series, for the registry."""
        decoders = self._decoders
        running = sum(decoder.running for decoder in decoders)
        total = sum(decoder.blocks_total for decoder in decoders)
        used = sum(decoder.blocks_used for decoder in decoders)
        yield self._gauge("vllm:num_requests_running", "Sequences being computed.", running)
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Requests that wait for room or for media, the queue's included.",
            max(0, self._live_requests - running),
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV blocks in use; 1 is all.",
            used / total if total else 0.0,
        )
        for name, value in (
            ("vllm:prefix_cache_queries", sum(d.prefix_queries for d in decoders)),
            ("vllm:prefix_cache_hits", sum(d.prefix_hits for d in decoders)),
            ("vllm:num_preemptions", sum(d.preemptions for d in decoders)),
        ):
            counter = CounterMetricFamily(name, "Of the present leases.", labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        yield from self._steps()

    def _steps(self) -> Iterable[Metric]:
        """How long steps may take and do take, where one is known."""
        begun = [d for d in self._decoders if d.steps]
        if not begun:
            return
        slowest = max(begun, key=lambda decoder: decoder.step_predicted_us)
        yield self._gauge(
            "tessera_step_target_seconds",
            "What a step may take while streams generate; 0 is any.",
            slowest.step_target_us / 1e6,
        )
        yield self._gauge(
            "tessera_step_predicted_seconds",
            "What the step that was planned last is predicted to take; of the decoder where that is most.",
            slowest.step_predicted_us / 1e6,
        )
        yield self._gauge(
            "tessera_step_prompt_tokens",
            "Most tokens that prompts could have in the step that was planned last; of the same decoder.",
            slowest.prompt_budget,
        )
        yield self._read_steps(begun)

    def _read_steps(self, decoders: Sequence[DecoderLoad]) -> Metric:
        counts: Counter[float] = Counter({inf: 0})
        for decoder in decoders:
            bounds = (*decoder.read_steps.bounds_s, inf)
            counts.update(dict(zip(bounds, decoder.read_steps.counts, strict=False)))
        below = accumulate(counts[bound] for bound in sorted(counts))
        buckets = [
            ("+Inf" if bound == inf else str(bound), count)
            for bound, count in zip(sorted(counts), below, strict=True)
        ]
        histogram = HistogramMetricFamily(
            "tessera_step_duration_seconds",
            "Steps while streams generated, of the present leases.",
            labels=["model_name"],
        )
        total_s = sum(decoder.read_steps.total_s for decoder in decoders)
        histogram.add_metric([self._model_name], buckets, total_s)
        return histogram

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge
