"""vLLM's routes that load and unload LoRA adapters."""

from functools import partial

from services.gateway.admission.caller import Caller
from services.gateway.api.vllm.schema import LoadAdapterRequest, UnloadAdapterRequest
from services.gateway.decoding.bounds import text, wrong
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
        for field, value in (("lora_name", name), ("lora_path", path)):
            if not value:
                raise wrong(field, "is missing: both 'lora_name' and 'lora_path' must be provided")
        await self._loading.load(name, path, in_place=asked.load_inplace is True)
        await _succeed(exchange, f"LoRA adapter '{name}' added successfully.")

    async def unload(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/unload_lora_adapter: serves an adapter no longer; requests that have it end with it."""
        body = await exchange.json_body(self._limits)
        asked = await off_loop(partial(decode, kind=UnloadAdapterRequest), body)
        name = text("lora_name", asked.lora_name, _LONGEST_NAME)
        if not name:
            raise wrong("lora_name", "is missing: 'lora_name' needs to be provided")
        await self._loading.unload(name)
        await _succeed(exchange, f"LoRA adapter '{name}' removed successfully.")


async def _succeed(exchange: Exchange, what: str) -> None:
    await exchange.respond(200, f"Success: {what}".encode(), _PLAIN)
