"""What operators, balancers and people ask: health, load, metrics, version, and a page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.gateway.admission.caller import Caller
from services.gateway.api.tessera.page import Page
from services.gateway.health import Health
from services.gateway.http.exchange import Exchange
from services.gateway.release import release
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.reporter import Reporter

_PAGE = Path(__file__).with_name("page.html")
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class Information:
    """The handlers about this gateway."""

    def __init__(
        self,
        health: Health,
        metrics: Metrics,
        reporter: Reporter,
        open_answers: Callable[[], int],
    ) -> None:
        """`open_answers` counts those that this gateway is giving."""
        self._health = health
        self._metrics = metrics
        self._reporter = reporter
        self._open_answers = open_answers
        self._page = Page(_PAGE)
        self._version = release()

    async def page(self, exchange: Exchange, caller: Caller) -> None:
        """GET /: a page to try the model on."""
        await self._page.send(exchange)

    async def live(self, exchange: Exchange, caller: Caller) -> None:
        """GET /health/live: this process answers."""
        await _json(exchange, {"status": "alive"})

    async def ready(self, exchange: Exchange, caller: Caller) -> None:
        """GET /health/ready: it can serve; 503 with the reasons if not."""
        missing = self._health.missing()
        content = {"status": "not ready" if missing else "ready", "missing": missing}
        await _json(exchange, content, 503 if missing else 200)

    async def load(self, exchange: Exchange, caller: Caller) -> None:
        """GET /load: the answers that this gateway is giving, for balancers that ask each."""
        await _json(exchange, {"server_load": self._open_answers()})

    async def metrics(self, exchange: Exchange, caller: Caller) -> None:
        """GET /metrics: those of the server, in the form of Prometheus. While Redis is away the schedulers' load is the
        last one known.
        """
        await exchange.respond(200, await self._reporter.page(self._metrics), _PROMETHEUS)

    async def version(self, exchange: Exchange, caller: Caller) -> None:
        """GET /version: which release the server is."""
        await _json(exchange, {"version": self._version})


async def _json(exchange: Exchange, content: dict[str, Any], status: int = 200) -> None:
    await exchange.respond(status, json.dumps(content).encode())
