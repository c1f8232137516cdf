"""What operators and balancers ask: health, load, metrics, version, and the state of the system."""

import json
from collections.abc import Callable
from typing import Any

from services.gateway.admission.caller import Caller
from services.gateway.health import Health
from services.gateway.http.exchange import Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.release import release
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.metrics.reporter import Reporter
from services.gateway.telemetry.system_state import SystemState


class Information:
    """The handlers about this gateway."""

    def __init__(
        self,
        health: Health,
        metrics: Metrics,
        reporter: Reporter,
        open_answers: Callable[[], int],
        state: SystemState,
        model: ServedModel,
        most_body_bytes: int,
    ) -> None:
        """`open_answers` counts those that this gateway is giving."""
        self._health = health
        self._metrics = metrics
        self._reporter = reporter
        self._open_answers = open_answers
        self._version = release()
        self._state = state
        self._model = model
        self._most_body_bytes = most_body_bytes

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
        """GET /metrics: those of the server, in the form of Prometheus, or in that of OpenMetrics where traces are
        exported and the header Accept names it. While Redis is away the schedulers' load is the last one known.
        """
        page = await self._reporter.page(self._metrics, exchange.header("accept"))
        await exchange.respond(200, page.body, page.content_type.encode())

    async def system(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/system: the services that are alive, their load, what waits, and the latest errors of all gateways.
        Raises Unavailable while Redis is away.
        """
        content = {
            "object": "system",
            "model": self._model.name,
            "version": self._version,
            "missing": self._health.missing(),
            "takes": list(self._model.takes),
            "limits": {
                "max_body_bytes": self._most_body_bytes,
                "max_model_len": self._model.max_model_len,
            },
            "open_answers": self._open_answers(),
            **await self._state.now(),
        }
        await _json(exchange, content)

    async def version(self, exchange: Exchange, caller: Caller) -> None:
        """GET /version: which release the server is."""
        await _json(exchange, {"version": self._version})


async def _json(exchange: Exchange, content: dict[str, Any], status: int = 200) -> None:
    await exchange.respond(status, json.dumps(content).encode())
