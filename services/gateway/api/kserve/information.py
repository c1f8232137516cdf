"""Health and metadata."""

import json
from collections.abc import Callable

from services.gateway.admission.caller import Caller
from services.gateway.api.kserve.schema import VERSION, ModelReply, ServerReply, TensorAbout
from services.gateway.health import Health
from services.gateway.http.exchange import Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.release import release
from shared.errors import Unavailable

PLATFORM = "tessera"
EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "parameters")
INPUTS = (
    ("text_input", "BYTES"),
    ("image", "BYTES"),
    ("sampling_parameters", "BYTES"),
    ("input_ids", "INT64"),
)
OUTPUTS = (("text_output", "BYTES"), ("output_ids", "UINT32"), ("finish_reason", "BYTES"))
_ONE = ("text_input", "sampling_parameters", "text_output", "finish_reason")


class Information:
    """The handlers about this server and its model."""

    def __init__(self, model: ServedModel, health: Health, model_of: Callable[[str], str]) -> None:
        """`model_of` finds the name of the model in a path."""
        self._model = model
        self._health = health
        self._model_of = model_of

    async def live(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v2/health/live: this process answers."""
        await exchange.respond(200, b"")

    async def ready(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v2/health/ready: it can serve. Raises Unavailable."""
        if missing := self._health.missing():
            raise Unavailable("NOT_READY", f"not ready: {', '.join(missing)}")
        await exchange.respond(200, b"")

    async def server(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v2: what the server is."""
        await exchange.reply(
            ServerReply(name=PLATFORM, version=release(), extensions=list(EXTENSIONS))
        )

    async def model(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v2/models/{model}: the tensors of its requests and replies. Raises NotFound."""
        name = self._named(exchange)
        await exchange.reply(
            ModelReply(
                name=name,
                versions=[VERSION],
                platform=PLATFORM,
                inputs=[_about(*one) for one in INPUTS],
                outputs=[_about(*one) for one in OUTPUTS],
            )
        )

    async def model_ready(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v2/models/{model}/ready: it can serve. Raises NotFound, Unavailable."""
        self._named(exchange)
        await self.ready(exchange, caller)

    async def config(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v2/models/{model}/config: its configuration, as Triton writes it. Raises NotFound."""
        content = {
            "name": self._named(exchange),
            "platform": PLATFORM,
            "max_batch_size": 0,
            "input": [_configured(*one) for one in INPUTS],
            "output": [_configured(*one) for one in OUTPUTS],
            "model_transaction_policy": {"decoupled": True},
        }
        await exchange.respond(200, json.dumps(content).encode())

    def _named(self, exchange: Exchange) -> str:
        """The name in the path: the model's, or that of an adapter. Raises NotFound."""
        name = self._model_of(exchange.path)
        self._model.check_name(name)
        return name


def dims(name: str) -> list[int]:
    """The shape of a tensor; -1 is any number."""
    return [1] if name in _ONE else [-1]


def _about(name: str, datatype: str) -> TensorAbout:
    return TensorAbout(name=name, datatype=datatype, shape=dims(name))


def _configured(name: str, datatype: str) -> dict[str, object]:
    kind = "STRING" if datatype == "BYTES" else datatype
    return {"name": name, "data_type": f"TYPE_{kind}", "dims": dims(name)}
