"""vLLM's routes that load and unload LoRA adapters."""

from functools import partial

from services.gateway.admission.caller import Caller
from services.gateway.api.vllm.schema import LoadAdapterRequest, UnloadAdapterRequest
from services.gateway.decoding.bounds import text
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.model.adapter_loading import AdapterLoading

_LONGEST_PATH = 4096
_LONGEST_NAME = 256
_PLAIN = b"text/plain; charset=utf-8"


class Adapters:
    """The handlers. What they answer is vLLM's."""

    def __init__(self, loading: AdapterLoading, limits: BodyLimits) -> None:
        self._loading = loading
        self._limits = limits

    async def load(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/load_lora_adapter: serves an adapter by a name, at all gateways, while the system runs."""
        body = await exchange.json_body(self._limits)
        asked = await off_loop(partial(decode, kind=LoadAdapterRequest), body)
        name = text("lora_name", asked.lora_name, _LONGEST_NAME)
        path = text("lora_path", asked.lora_path, _LONGEST_PATH)
        not_known = await self._loading.load(name, path, in_place=asked.load_inplace is True)
        await _succeed(exchange, f"LoRA adapter '{name}' added successfully.", not_known)

    async def unload(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/unload_lora_adapter: serves an adapter no longer; requests that have it end with it."""
        body = await exchange.json_body(self._limits)
        asked = await off_loop(partial(decode, kind=UnloadAdapterRequest), body)
        name = text("lora_name", asked.lora_name, _LONGEST_NAME)
        not_known = await self._loading.unload(name)
        await _succeed(exchange, f"LoRA adapter '{name}' removed successfully.", not_known)


async def _succeed(exchange: Exchange, what: str, not_known: str) -> None:
    await exchange.respond(
        200, " ".join(filter(None, (f"Success: {what}", not_known))).encode(), _PLAIN
    )
