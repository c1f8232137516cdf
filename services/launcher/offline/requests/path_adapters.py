"""Adapters that are loaded by their paths when a prompt names them."""

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path

from services.launcher.offline.lora_request import LoRARequest
from shared.client import Client

# More than requests are under way: one that is in use is never the one that was used longest ago.
_MOST = 1024


class PathAdapters:
    """Those of one event loop. A name may have several folders, one after the other: each has a name of its own at the
    server, so that a prompt gets the one that it named."""

    def __init__(self, client: Client, given: Mapping[str, Path], *, by_path: bool) -> None:
        """given: those of `lora_modules`; by_path: whether others may be loaded."""
        self._client = client
        self._given = given
        self._by_path = by_path
        self._names: dict[LoRARequest, str] = {}  # the one used last stands last
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()

    async def name_of(self, adapter: LoRARequest) -> str:
        """The name by which the server has an adapter, which is loaded if need be. Raises ValueError, ClientError."""
        name, path = adapter.lora_name, adapter.lora_path
        if not path:
            return name
        folder = Path(path).expanduser().absolute()
        if (given := self._given.get(name)) is not None:
            if given.resolve() != folder.resolve():
                raise ValueError(
                    f"lora_request: {name!r} is the adapter in {given}, by lora_modules, and not that in {path}"
                )
            return name
        if not self._by_path:
            raise ValueError(
                f"lora_request: {name!r} is none of lora_modules: give the engine enable_lora=True, and adapters are"
                " loaded from their folders"
            )
        async with self._loading:
            found = self._names.pop(adapter, None) or await self._load(name, str(folder))
            self._names[adapter] = found
        return found

    async def _load(self, name: str, folder: str) -> str:
        if name in self._names.values():
            name = f"{name}.{next(self._numbers)}"
        # In place: another event loop of this program may have loaded it.
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        await self._client.post("/v1/load_lora_adapter", body)
        if len(self._names) >= _MOST:
            oldest = next(iter(self._names))
            await self._client.post(
                "/v1/unload_lora_adapter", {"lora_name": self._names.pop(oldest)}
            )
        return name
