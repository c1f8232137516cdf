"""The load that schedulers publish of their decoders, as series of the metrics page."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.environment import unix_time
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

_FIRST = 0  # the engine that has what belongs to no engine
_LABELS = ("model_name", "engine")


class SchedulerLoad(Collector):
    """What the schedulers published in Redis, each decoder being an engine with a number. Empty where another
    gateway reports it (`reporter.py`).
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._decoders: dict[int, DecoderLoad] | None = None
        self._live_requests = self._live_tokens = self._queued = 0
        self._queue_age_s = 0.0
        self._stored_bytes = self._open_batches = 0

    def update(
        self,
        decoders: Mapping[int, DecoderLoad],
        live: tuple[int, int],
        queue: tuple[int, float],
        stored_bytes: int,
        open_batches: int,
    ) -> None:
        """Keeps what was read just now. `live` counts requests that are reserved, waiting or running, and their cost in
        tokens; `queue` those that wait to be taken, and the oldest one's age in seconds; `stored_bytes` are those of
        files and batches.
        """
        self._decoders = dict(decoders)
        self._live_requests, self._live_tokens = live
        self._queued, self._queue_age_s = queue
        self._stored_bytes, self._open_batches = stored_bytes, open_batches

    def leave_out(self) -> None:
        """Another gateway reports it."""
        self._decoders = None

    def collect(self) -> Iterable[Metric]:
        """The series, for the registry."""
        if self._decoders is None:
            return
        decoders = self._decoders
        engines = decoders or {_FIRST: DecoderLoad()}
        yield self._gauges(
            "vllm:num_requests_running",
            "Sequences being computed.",
            {engine: decoder.running for engine, decoder in engines.items()},
        )
        waiting = self._waiting(engines)
        yield self._gauges(
            "vllm:num_requests_waiting",
            "Requests that wait for room or for media; the queue's with the first engine.",
            waiting,
        )
        yield self._waiting_by_reason(engines, waiting)
        yield self._gauges(
            "vllm:kv_cache_usage_perc",
            "KV blocks in use; 1 is all.",
            {
                engine: decoder.blocks_used / max(1, decoder.blocks_total)
                for engine, decoder in engines.items()
            },
        )
        yield self._counters(
            "vllm:prefix_cache_queries",
            "Prompt tokens that were looked for in the prefix cache, since the lease.",
            lambda d: d.prefix_queries * d.block_size,
        )
        yield self._counters(
            "vllm:prefix_cache_hits",
            "Of these, those that were found.",
            lambda d: d.prefix_hits * d.block_size,
        )
        yield self._counters(
            "vllm:num_preemptions", "Preemptions since the lease.", lambda d: d.preemptions
        )
        yield from self._drafts()
        yield self._cache_info()
        yield from self._adapters()
        yield self._step_tokens()
        yield from self._steps()
        text = "Requests that are reserved, waiting or running, of all gateways."
        yield self._gauge("tessera_live_requests", text, self._live_requests)
        text = (
            "What they may cost at most, in tokens of prompts and answers: what admission limits."
        )
        yield self._gauge("tessera_live_tokens", text, self._live_tokens)
        text = "Requests in the queue: admitted, and taken by no scheduler."
        yield self._gauge("tessera_queue_requests", text, self._queued)
        text = "Since the oldest request in the queue arrived; 0 where there is none."
        yield self._gauge("tessera_queue_age_seconds", text, self._queue_age_s)
        text = "Bytes of all files, and of the results of batches."
        yield GaugeMetricFamily("tessera_stored_file_bytes", text, self._stored_bytes)
        text = "Batches that have not ended."
        yield GaugeMetricFamily("tessera_open_batches", text, self._open_batches)

    def _waiting(self, engines: Mapping[int, DecoderLoad]) -> dict[int, float]:
        left = max(0, self._live_requests - sum(d.running for d in engines.values()))
        waiting: dict[int, float] = {}
        for engine, decoder in engines.items():
            waiting[engine] = min(left, decoder.waiting)
            left -= min(left, decoder.waiting)
        waiting[min(engines)] += left
        return waiting

    def _waiting_by_reason(
        self, engines: Mapping[int, DecoderLoad], waiting: Mapping[int, float]
    ) -> Metric:
        """The same requests, by whether they could begin if there was room."""
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests: for room (capacity), or for the embeddings of their media (deferred).",
            labels=[*_LABELS, "reason"],
        )
        for engine, count in sorted(waiting.items()):
            deferred = min(count, engines[engine].waiting_for_media)
            for reason, value in (("capacity", count - deferred), ("deferred", deferred)):
                family.add_metric([self._model_name, str(engine), reason], value)
        return family

    def _drafts(self) -> Iterable[Metric]:
        """What became of drafts, where a decoder has some."""
        drafting = [(n, d.drafts) for n, d in self._engines() if d.HasField("drafts")]
        if not drafting:
            return
        counted = {
            "drafts": ("Rows with drafts, since the lease.", [d.rows for _, d in drafting]),
            "draft_tokens": ("Drafts in them.", [d.tokens for _, d in drafting]),
            "accepted_tokens": ("Drafts that were right.", [sum(d.accepted) for _, d in drafting]),
        }
        for name, (text, values) in counted.items():
            counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=_LABELS)
            for (engine, _), value in zip(drafting, values, strict=True):
                counter.add_metric([self._model_name, str(engine)], value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place behind a row's own token.",
            labels=[*_LABELS, "position"],
        )
        for engine, drafts in drafting:
            for place, count in enumerate(drafts.accepted):
                places.add_metric([self._model_name, str(engine), str(place)], count)
        yield places

    def _cache_info(self) -> Metric:
        names = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching")
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "What the KV cache of each engine is like; always 1.",
            labels=[*_LABELS, *names],
        )
        for engine, decoder in self._engines():
            sizes = (decoder.block_size, decoder.blocks_total, decoder.host_blocks)
            labels = [self._model_name, str(engine), *map(str, sizes), "True"]
            family.add_metric(labels, 1)
        return family

    def _adapters(self) -> Iterable[Metric]:
        """Which adapters sequences have, with vLLM's labels and its value: readers take the latest of several."""
        decoders = [decoder for _, decoder in self._engines()]
        most = max((decoder.max_adapters for decoder in decoders), default=0)
        if not most:
            return
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting sequences; the value is the time in seconds since the epoch.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        waiting = {name for decoder in decoders for name in decoder.waiting_adapters}
        running = {name for decoder in decoders for name in decoder.running_adapters}
        labels = [str(most), ",".join(sorted(waiting)), ",".join(sorted(running))]
        family.add_metric(labels, unix_time())
        yield family

    def _step_tokens(self) -> Metric:
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens that were computed in a step, since the lease.",
            labels=_LABELS,
        )
        for engine, decoder in self._engines():
            counted = decoder.step_tokens
            if counted.counts:
                bounds = [*map(float, counted.bounds), inf]
                counts = Counter(dict(zip(bounds, counted.counts, strict=True)))
                labels = [self._model_name, str(engine)]
                family.add_metric(labels, _buckets(counts), counted.total)
        return family

    def _steps(self) -> Iterable[Metric]:
        """How long steps may take and do take, where one is known."""
        begun = [decoder for _, decoder in self._engines() if decoder.steps]
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
        histogram = HistogramMetricFamily(
            "tessera_step_duration_seconds",
            "Steps while streams generated, of the present leases.",
            labels=["model_name"],
        )
        total_s = sum(decoder.read_steps.total_s for decoder in decoders)
        histogram.add_metric([self._model_name], _buckets(counts), total_s)
        return histogram

    def _engines(self) -> list[tuple[int, DecoderLoad]]:
        return sorted((self._decoders or {}).items())

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge

    def _gauges(self, name: str, text: str, values: Mapping[int, float]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        for engine, value in sorted(values.items()):
            gauge.add_metric([self._model_name, str(engine)], value)
        return gauge

    def _counters(
        self, name: str, text: str, value: Callable[[DecoderLoad], float]
    ) -> CounterMetricFamily:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        for engine, decoder in self._engines():
            counter.add_metric([self._model_name, str(engine)], value(decoder))
        return counter


def _buckets(counts: "Counter[float]") -> list[tuple[str, float]]:
    """How many lie at or below each bound."""
    below = accumulate(counts[bound] for bound in sorted(counts))
    return [
        ("+Inf" if bound == inf else str(bound), count)
        for bound, count in zip(sorted(counts), below, strict=True)
    ]
