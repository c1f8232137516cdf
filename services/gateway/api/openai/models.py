"""/v1/models: what is served."""

from services.gateway.admission.caller import Caller
from services.gateway.api.openai.schema import ModelCard, ModelList
from services.gateway.http.exchange import Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.telemetry.served_parts import ServedParts


class Models:
    """The handlers about the one model there is."""

    def __init__(self, model: ServedModel, parts: ServedParts) -> None:
        self._model = model
        self._parts = parts

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models: the one model that is served."""
        await exchange.reply(ModelList(data=[await self._card()]))

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models/{id}: the same by its name, which may have slashes. Raises NotFound."""
        self._model.check_name(exchange.path.removeprefix("/v1/models/"))
        await exchange.reply(await self._card())

    async def _card(self) -> ModelCard:
        return ModelCard(
            id=self._model.name,
            created=self._model.created_unix_s,
            max_model_len=self._model.max_model_len,
            tasks=[task.value for task in self._model.tasks],
            parts=await self._parts.now(),
        )
