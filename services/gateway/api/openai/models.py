"""/v1/models: what is served."""

from services.gateway.admission.caller import Caller
from services.gateway.admission.model import ServedModel
from services.gateway.api.openai.schema import ModelCard, ModelList
from services.gateway.http.exchange import Exchange


class Models:
    """The handlers about the one model there is."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._card = ModelCard(
            id=model.name, created=model.created_unix_s, max_model_len=model.max_model_len
        )

    async def all(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models."""
        await exchange.reply(ModelList(data=[self._card]))

    async def one(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models/{id}, whose names may have slashes. Raises NotFound."""
        self._model.check_name(exchange.path.removeprefix("/v1/models/"))
        await exchange.reply(self._card)
