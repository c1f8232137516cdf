"""The cold routes: models, health, load, metrics, version, tokenizing, and the page for people."""

import asyncio
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.api.openai.requests import read_conversation
from services.gateway.api.openai.schema import DetokenizeRequest, TokenizeRequest
from services.gateway.health import Health
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.reading.bounds import wholes, wrong
from services.gateway.reading.data_urls import decode_media
from services.gateway.reading.decode import decode, off_loop
from services.gateway.reading.generation import check_model
from services.gateway.reading.unsupported import refuse_unsupported
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.reporter import Reporter
from shared.queue.token_log import decode_tokens
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

_T = TypeVar("_T")

_PAGE = Path(__file__).with_name("page.html")
_HTML = b"text/html; charset=utf-8"
# To be turned into text at once, whatever the model's length.
_LEAST_TOKENS = 65_536
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class Information:
    """The handlers that do not generate."""

    def __init__(
        self,
        model: ServedModel,
        pool: PreprocessPool,
        health: Health,
        metrics: Metrics,
        reporter: Reporter,
        body_limits: BodyLimits,
        open_answers: Callable[[], int],
    ) -> None:
        """`open_answers` counts those that this gateway is giving."""
        self._model = model
        self._pool = pool
        self._health = health
        self._metrics = metrics
        self._reporter = reporter
        self._body_limits = body_limits
        self._open_answers = open_answers
        self._page = _PAGE.read_bytes()
        self._version = _version()

    async def page(self, exchange: Exchange, caller: Caller) -> None:
        """GET /: a page to try the model on."""
        await exchange.respond(200, self._page, _HTML)

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
        """GET /metrics. While Redis is away the schedulers' load is the last one known."""
        await self._reporter.look()
        await exchange.respond(200, self._metrics.text(), _PROMETHEUS)

    async def version(self, exchange: Exchange, caller: Caller) -> None:
        """GET /version."""
        await _json(exchange, {"version": self._version})

    async def models(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models."""
        await _json(exchange, {"object": "list", "data": [self._card()]})

    async def one_model(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models/{id}."""
        self._model.check_name(exchange.path.removeprefix("/v1/models/"))
        await _json(exchange, self._card())

    async def tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /tokenize: `prompt`, or `messages` with the chat template."""
        prepare = await self._read(exchange, self._read_tokenize)
        prepare.request_id = caller.request_id
        prepare.tenant = tenant_of(caller, "")
        async with exchange.while_connected():
            await decode_media(prepare)
            prepared = await self._pool.prepare(prepare)
            tokens = decode_tokens(prepared.token_ids)
            limit = self._model.max_model_len
            await _json(exchange, {"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /detokenize: `tokens` to `prompt`."""
        tokens = await self._read(exchange, self._read_detokenize)
        text = await asyncio.to_thread(self._model.table.text, tokens, skip_special_tokens=False)
        await _json(exchange, {"prompt": text})

    async def tokenizer_info(self, exchange: Exchange, caller: Caller) -> None:
        """GET /tokenizer_info: the checkpoint's tokenizer_config.json, with the chat template."""
        await _json(exchange, dict(self._model.tokenizer_info))

    async def _read(self, exchange: Exchange, read: Callable[[bytes], _T]) -> _T:
        body = await exchange.json_body(self._body_limits)
        found = await off_loop(read, body)
        exchange.release_body()
        return found

    def _read_tokenize(self, body: bytes) -> PrepareRequest:
        content = decode(body, TokenizeRequest)
        check_model(content.model, self._model)
        if content.messages is not None:
            refuse_unsupported(content)
            return PrepareRequest(conversation=read_conversation(content))
        if content.prompt is None:
            raise wrong("prompt", "is missing")
        return PrepareRequest(text=content.prompt)

    def _read_detokenize(self, body: bytes) -> list[int]:
        content = decode(body, DetokenizeRequest)
        check_model(content.model, self._model)
        if content.tokens is None:
            raise wrong("tokens", "is missing")
        most = max(self._model.max_model_len, _LEAST_TOKENS)
        return list(wholes("tokens", content.tokens, 0, self._model.vocab_size - 1, most))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_unix_s,
            "owned_by": "tessera",
            "max_model_len": self._model.max_model_len,
        }


async def _json(exchange: Exchange, content: dict[str, Any], status: int = 200) -> None:
    await exchange.respond(status, json.dumps(content, ensure_ascii=False).encode())


def _version() -> str:
    try:
        return version("tessera-serve")
    except PackageNotFoundError:  # run from a checkout
        return "0.1.0+checkout"
