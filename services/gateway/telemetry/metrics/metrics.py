"""Prometheus metrics under the names of vLLM where they mean the same, with its labels and buckets, so that dashboards
and autoscalers work.

What a gateway measures itself has `engine="0"`: it does not know which decoders computed a request.
"""

from collections.abc import Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.openmetrics import exposition as open_metrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from services.gateway.endings import FINISH_NAMES
from services.gateway.telemetry.metrics.batch_metrics import BatchMetrics
from services.gateway.telemetry.metrics.http_metrics import HttpMetrics
from services.gateway.telemetry.metrics.scheduler_load import SchedulerLoad
from services.gateway.telemetry.metrics.token_series import GapHistogram, TokenCounter
from services.gateway.telemetry.recent_errors import RecentErrors
from services.gateway.telemetry.timeline import Timeline
from shared.net.metrics_page import CONTENT_TYPE, EveryProcess, Page
from shared.telemetry.exposition import MeasuresCollector, process_registry, text_of
from shared.telemetry.series import Measures
from tessera.common.v1.ending_pb2 import Ending

_OPEN_METRICS = "application/openmetrics-text"
_OPEN_METRICS_VERSION = "1.0.0"
_OPEN_METRICS_TYPE = f"{_OPEN_METRICS}; version={_OPEN_METRICS_VERSION}; charset=utf-8"
_LABELS = ("model_name", "engine")
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_N = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

# vLLM says "abort" where a request was cancelled.
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All series of one gateway, with its own registry."""

    def __init__(
        self, model_name: str, max_model_len: int, errors: RecentErrors | None = None
    ) -> None:
        """`max_model_len` bounds the buckets of token counts; `errors` are told of what requests end with."""
        # Whether traces are exported, which exemplars can name.
        self.has_traces = False
        self.errors = errors or RecentErrors()
        self.registry = process_registry(EveryProcess("gateway", model_name))
        self.load = SchedulerLoad(model_name)
        self.registry.register(self.load)
        self.http = HttpMetrics(self.registry)
        self.batches = BatchMetrics(self.registry)
        self._labels = (model_name, "0")
        tokens = _one_two_five(max_model_len)
        histogram = self._histogram
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Tokens of prompts that were computed."
        )
        cached = "Of the prompts of requests that ended, the tokens found in the prefix cache."
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", cached)
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Tokens of the prompts of requests that ended, by where they came from.",
            [*_LABELS, "source"],
            registry=self.registry,
        )
        self._by_source = {of: by_source.labels(*self._labels, of) for of in _SOURCES}
        generated = TokenCounter(
            "vllm:generation_tokens", "Tokens given out.", _LABELS, self._labels
        )
        self.registry.register(generated)
        cache = "Media items that were looked for in the caches of pixel values."
        self._mm_queries = self._counter("vllm:mm_cache_queries", cache)
        self._mm_hits = self._counter("vllm:mm_cache_hits", "Of these, those that were found.")
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._success = {reason: success.labels(*self._labels, reason) for reason in _REASONS}
        name = "vllm:time_to_first_token_seconds"
        self._ttft = histogram(name, "From arrival to the first token.", _TTFT_S)
        name = "vllm:inter_token_latency_seconds"
        text = "Between one token of a choice and the next; tokens that arrive together share the time."
        itl = GapHistogram(name, text, _LABELS, self._labels, _TOKEN_S)
        self.registry.register(itl)
        name = "vllm:request_time_per_output_token_seconds"
        self._per_token = histogram(name, "Between tokens, the mean of a request.", _TOKEN_S)
        name = "vllm:e2e_request_latency_seconds"
        self._e2e = histogram(name, "From arrival to the end.", _REQUEST_S)
        name = "vllm:request_queue_time_seconds"
        self._queue = histogram(name, "From admission to a decoder.", _REQUEST_S)
        name = "vllm:request_prefill_time_seconds"
        self._prefill = histogram(name, "At a decoder, to the first token.", _REQUEST_S)
        name = "vllm:request_decode_time_seconds"
        self._decode = histogram(name, "From the first token to the last.", _REQUEST_S)
        name = "vllm:request_inference_time_seconds"
        self._inference = histogram(name, "At a decoder, to the last token.", _REQUEST_S)
        name = "vllm:request_prompt_tokens"
        self._prompt_size = histogram(name, "Tokens of a prompt.", tokens)
        name = "vllm:request_generation_tokens"
        self._answer_size = histogram(name, "Tokens of all answers to a request.", tokens)
        name = "vllm:request_prefill_kv_computed_tokens"
        text = "Tokens of a prompt that were not found in the prefix cache."
        self._computed_size = histogram(name, text, tokens)
        name = "vllm:request_num_preemptions"
        self._preemptions = histogram(name, "Preemptions of a request.", _PREEMPTIONS)
        name = "vllm:request_max_num_generation_tokens"
        self._longest = histogram(name, "Tokens of a request's longest answer.", tokens)
        name = "vllm:request_params_max_tokens"
        self._max_tokens = histogram(name, "The parameter max_tokens.", tokens)
        self._n = histogram("vllm:request_params_n", "The parameter n.", _N)
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
            "Requests restored to a Redis that came back, by whether it took them.",
            [*_LABELS, "result"],
            registry=self.registry,
        )
        self.inter_token = itl.observe
        self.generated = generated.add

    def watch(self, measures: Measures) -> None:
        """Shows what these read, whenever the page is asked for."""
        self.registry.register(MeasuresCollector(measures))

    def first_token(self, seconds: float, prompt_tokens: int, trace_id: str = "") -> None:
        """A prompt has been computed, so long after it arrived; `trace_id` is that of a trace that is exported."""
        self._ttft.observe(seconds, _exemplar(trace_id))
        self._prompt_tokens.inc(prompt_tokens)

    def stage(self, name: str, seconds: float) -> None:
        """One stage of one request took this long."""
        series = self._stage_series.get(name)
        if series is None:
            series = self._stage_series[name] = self._stages.labels(name)
        series.observe(seconds)

    def media(self, items: int, cached: int) -> None:
        """So many items of a prompt were prepared, some of which were known."""
        self._mm_queries.inc(items)
        self._mm_hits.inc(cached)

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
        """Redis came back, and the requests that this gateway follows were restored."""
        self._restores.labels(*self._labels, "restored").inc(taken)
        self._restores.labels(*self._labels, "refused").inc(refused)

    def ended(
        self,
        ending: Ending | None,
        timeline: Timeline,
        *,
        prompt_tokens: int,
        cached_tokens: int | None,
        preemptions: int,
        answers: Sequence[int],
        max_tokens: int,
        trace_id: str = "",
    ) -> None:
        """An accepted request is over; without an ending the client left. `cached_tokens` of its prompt is None where
        no choice ended, `answers` are the tokens of each choice. `trace_id` is that of a trace that is exported.
        """
        exemplar = _exemplar(trace_id)
        self._success[finish_reason(ending)].inc()
        self._prompt_size.observe(prompt_tokens)
        if cached_tokens is not None and timeline.first_token:
            computed = prompt_tokens - cached_tokens
            self._cached_tokens.inc(cached_tokens)
            self._by_source["local_cache_hit"].inc(cached_tokens)
            self._by_source["local_compute"].inc(computed)
            self._computed_size.observe(computed)
        self._preemptions.observe(preemptions)
        self._answer_size.observe(sum(answers))
        self._longest.observe(max(answers))
        self._max_tokens.observe(max_tokens)
        self._n.observe(len(answers))
        self._e2e.observe(timeline.total_s, exemplar)
        if timeline.queue_s is not None:
            self._queue.observe(timeline.queue_s, exemplar)
        if timeline.decode_s is not None:
            self._decode.observe(timeline.decode_s, exemplar)
            if max(answers) > 1:
                self._per_token.observe(timeline.decode_s / (max(answers) - 1), exemplar)
        if timeline.prefill_s is not None and timeline.decode_s is not None:
            self._prefill.observe(timeline.prefill_s, exemplar)
            self._inference.observe(timeline.prefill_s + timeline.decode_s, exemplar)

    def text(self) -> bytes:
        """The page in Prometheus's text format."""
        return text_of(self.registry)

    def page(self, accept: str) -> Page:
        """The page in the form that is asked for: OpenMetrics, with the traces of some observations, where traces are
        exported and the header Accept names it; else Prometheus's text format.
        """
        if not self.has_traces or _OPEN_METRICS not in accept:
            return Page(self.text(), CONTENT_TYPE)
        # No name needs escapes. With other escaping prometheus_client makes an underscore of the colon of `vllm:`.
        body: bytes = open_metrics.generate_latest(  # type: ignore[no-untyped-call]
            self.registry, ALLOWUTF8, _OPEN_METRICS_VERSION
        )
        return Page(body, _OPEN_METRICS_TYPE)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, _LABELS, registry=self.registry)
        return counter.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._labels)


def _exemplar(trace_id: str) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None


def finish_reason(ending: Ending | None) -> str:
    """stop, length, abort or error."""
    name = "cancelled" if ending is None else FINISH_NAMES.get(ending.reason, "error")
    return "abort" if name == "cancelled" else name


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return [float(step) for step in steps if step <= most]
