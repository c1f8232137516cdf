"""Tessera's own REST API: requests by name, and what operators and balancers ask."""

from collections.abc import Sequence

from services.gateway.api.endpoint import Route
from services.gateway.api.tessera.information import Information
from services.gateway.api.tessera.requests import Requests
from services.gateway.http.errors import error_body
from shared.errors import ServingError


class TesseraEndpoint:
    """Requests that exist, health, load, metrics, version, and the page for people."""

    def __init__(self, requests: Requests, information: Information) -> None:
        ready, live = information.ready, information.live
        self.routes: Sequence[Route] = (
            Route("GET", "/v1/requests/*", requests.state),
            Route("DELETE", "/v1/requests/*", requests.cancel),
            Route("GET", "/v1/requests/*/stream", requests.stream),
            Route("GET", "/health", ready, needs_key=False, is_probe=True),
            Route("GET", "/health/ready", ready, needs_key=False, is_probe=True),
            Route("GET", "/health/live", live, needs_key=False, is_probe=True),
            Route("GET", "/ping", ready, needs_key=False, is_probe=True),
            Route("POST", "/ping", ready, needs_key=False, is_probe=True),
            # Scrapers and the page itself carry no key.
            Route("GET", "/", information.page, needs_key=False),
            Route("GET", "/load", information.load, needs_key=False),
            Route("GET", "/metrics", information.metrics, needs_key=False),
            Route("GET", "/version", information.version, needs_key=False),
        )

    def error(self, error: ServingError) -> bytes:
        """In OpenAI's form."""
        return error_body(error)
