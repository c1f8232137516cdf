"""/v1/models: what is served."""

from datetime import UTC, datetime

from services.gateway.admission.caller import Caller
from services.gateway.api.openai.schema import ModelCard, ModelList
from services.gateway.http.exchange import Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.telemetry.served_parts import ServedParts


class Models:
    """The handlers about the one model there is, and its adapters."""

    def __init__(self, model: ServedModel, parts: ServedParts) -> None:
        self._model = model
        self._parts = parts

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models: the one model that is served, and its adapters."""
        names = self._model.names
        cards = [await self._card(name) for name in names]
        await exchange.reply(ModelList(data=cards, first_id=names[0], last_id=names[-1]))

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models/{id}: one of them by its name, which may have slashes. Raises NotFound."""
        name = exchange.path.removeprefix("/v1/models/")
        self._model.check_name(name)
        await exchange.reply(await self._card(name))

    async def _card(self, name: str) -> ModelCard:
        adapters = self._model.adapters
        return ModelCard(
            id=name,
            created=self._model.created_unix_s,
            display_name=name,
            created_at=f"{datetime.fromtimestamp(self._model.created_unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
            max_model_len=self._model.max_model_len,
            parent=self._model.name if name in adapters else None,
            adapter=(adapters.default or None) if name == self._model.name else None,
            tasks=[task.value for task in self._model.tasks],
            parts=await self._parts.now(),
        )
