"""HTTP requests, in the series that vLLM has of them: names, labels and buckets are those of the package
prometheus-fastapi-instrumentator.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

# Pages that probes and Prometheus itself ask for are not counted.
_LEFT_OUT = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
_LEFT_OUT_BELOW = "/health/"
_FINE_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5),
    *(7.5, 10, 30, 60),
)
_COARSE_S = (0.1, 0.5, 1)
NO_ROUTE = "none"


class HttpMetrics:
    """Counts every HTTP request when its response has been sent, or its client has left."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "http_requests_total",
            "HTTP requests by method, status and route.",
            ["method", "status", "handler"],
            registry=registry,
        )
        self._request_bytes = Summary(
            "http_request_size_bytes",
            "Content-Length of HTTP requests; 0 where they have none.",
            ["handler"],
            registry=registry,
        )
        self._response_bytes = Summary(
            "http_response_size_bytes",
            "Content-Length of HTTP responses; 0 where they have none: streams.",
            ["handler"],
            registry=registry,
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "From the head of an HTTP request to the end of its response.",
            buckets=_FINE_S,
            registry=registry,
        )
        self._coarse = Histogram(
            "http_request_duration_seconds",
            "The same, by method and route.",
            ["method", "handler"],
            buckets=_COARSE_S,
            registry=registry,
        )

    def ended(
        self,
        method: str,
        handler: str,
        status: int,
        *,
        request_bytes: int,
        response_bytes: int,
        seconds: float,
    ) -> None:
        """One is over. `handler` is the path of its route as the table of routes has it, or NO_ROUTE."""
        if handler in _LEFT_OUT or handler.startswith(_LEFT_OUT_BELOW):
            return
        self._total.labels(method, f"{status // 100}xx", handler).inc()
        self._request_bytes.labels(handler).observe(request_bytes)
        self._response_bytes.labels(handler).observe(response_bytes)
        self._fine.observe(seconds)
        self._coarse.labels(method, handler).observe(seconds)
