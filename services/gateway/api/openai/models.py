"""/v1/models: what is served."""

import contextlib

import msgspec

from services.gateway.admission.caller import Caller
from services.gateway.admission.model import ServedModel
from services.gateway.api.openai.schema import ModelCard, ModelList
from services.gateway.http.exchange import Exchange
from services.gateway.redis_calls import within
from shared.errors import Unavailable
from shared.queue import Queue

# The part of the model that each service runs.
_PARTS = {"preprocess": "prompt", "vision_encoder": "encoder", "decoder": "decoder"}
_REDIS_S = 1.0


class Models:
    """The handlers about the one model there is."""

    def __init__(self, model: ServedModel, queue: Queue) -> None:
        self._model = model
        self._queue = queue
        self._card = ModelCard(
            id=model.name, created=model.created_unix_s, max_model_len=model.max_model_len
        )

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models."""
        await exchange.reply(ModelList(data=[await self._now()]))

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models/{id}, whose names may have slashes. Raises NotFound."""
        self._model.check_name(exchange.path.removeprefix("/v1/models/"))
        await exchange.reply(await self._now())

    async def _now(self) -> ModelCard:
        """With what the services say; while Redis is away, as it was told last."""
        with contextlib.suppress(Unavailable):
            said = await within(self._queue.parts(), _REDIS_S)
            parts = {part: said[service] for service, part in _PARTS.items() if service in said}
            self._card = msgspec.structs.replace(self._card, parts=parts)
        return self._card
