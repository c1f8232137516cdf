"""Loads and unloads LoRA adapters while the system runs, for all gateways and decoders."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.gateway.model.served_model import ServedModel
from shared.environment import monotonic
from shared.errors import InvalidRequest, Precondition
from shared.lora.adapter import LoraAdapter
from shared.lora.adapter_file import ADAPTER_FILE
from shared.lora.allowed_folder import allowed_folder
from shared.lora.modules import BASE, LONGEST_NAME, is_name
from shared.queue.adapters import AdapterDirectory, AdapterProgress, AdapterRegistry

log = structlog.get_logger(__name__)

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """allowed: below which folders may lie; None loads nothing. wait_s: for decoders and other gateways."""

    allowed: Path | None
    max_rank: int
    wait_s: float


class AdapterLoading:
    """One change after the other: a second one waits for the first."""

    def __init__(
        self,
        model: ServedModel,
        registry: AdapterRegistry,
        directory: AdapterDirectory,
        limits: AdapterLimits,
    ) -> None:
        self._model = model
        self._registry = registry
        self._directory = directory
        self._limits = limits
        self._changing = asyncio.Lock()

    async def load(self, name: str, folder: str, *, in_place: bool) -> str:
        """Serves the adapter in a folder by a name; `in_place`: also where another one has it. Returns when every live
        gateway serves it and every live decoder has read it, or has no place for it now and reads it when asked; how
        many have not said so in time stands in what is returned, which is empty otherwise.

        Raises InvalidRequest for a name, a folder or an adapter that is not served, and Unavailable.
        """
        allowed = self._require_allowed()
        _require(lora_name=name, lora_path=folder)
        if not is_name(name):
            raise InvalidRequest(
                "INVALID_VALUE",
                f"lora_name must have 1 to {LONGEST_NAME} characters, all of them printable",
                field="lora_name",
            )
        if name in (self._model.name, BASE):
            raise InvalidRequest(
                "ADAPTER_NAME_TAKEN",
                f"lora_name: {name!r} is the model itself, and no adapter's name",
                field="lora_name",
            )
        self._require_not_fixed(name)
        adapter = await asyncio.to_thread(self._open, folder, allowed)
        async with self._changing:
            await self._directory.refresh()
            before = self._directory.adapters
            lora_id, at = adapter.lora_id, str(adapter.folder)
            version = await self._registry.put(name, lora_id, at, in_place=in_place)
            progress = await self._until_followed(version, lora_id)
            if progress.failures:
                replaced = before.names.get(name)
                if replaced is None:
                    await self._registry.remove(name)
                else:
                    at = before.folders[replaced]
                    await self._registry.put(name, replaced, at, in_place=True)
                await self._directory.refresh()
                raise InvalidRequest(
                    "BAD_ADAPTER",
                    f"lora_path: a decoder could not read it: {progress.failures[0]}",
                    field="lora_path",
                )
        log.info("loaded adapter", name=name, lora_id=lora_id, folder=at)
        return self._not_known(progress)

    async def unload(self, name: str) -> str:
        """Serves nothing by a name any more, once every live gateway knows; requests that were admitted end with their
        adapter. Returns as `load` does. Raises NotFound for a name that no adapter has, InvalidRequest, and
        Unavailable."""
        self._require_allowed()
        _require(lora_name=name)
        self._require_not_fixed(name)
        async with self._changing:
            version = await self._registry.remove(name)
            progress = await self._until_followed(version)
        log.info("unloaded adapter", name=name)
        return self._not_known(progress)

    def _require_allowed(self) -> Path:
        if self._limits.allowed is None:
            raise Precondition(
                "ADAPTERS_NOT_ALLOWED",
                "this server loads no adapters while it runs: start it with --allowed-adapter-dir, the folder below"
                " which they lie",
            )
        return self._limits.allowed

    def _require_not_fixed(self, name: str) -> None:
        if name in self._model.adapters.fixed:
            raise InvalidRequest(
                "ADAPTER_NAME_TAKEN",
                f"lora_name: {name!r} is an adapter of --lora-modules or {ADAPTER_FILE}, which stays as long as the"
                " server runs: change that and start anew",
                field="lora_name",
            )

    def _open(self, folder: str, allowed: Path) -> LoraAdapter:
        adapter = LoraAdapter.open(allowed_folder(folder, allowed), self._limits.max_rank)
        _ = adapter.lora_id  # reads the whole file, here on a thread
        return adapter

    def _not_known(self, progress: AdapterProgress) -> str:
        silent = [
            f"{count} of the {who}"
            for who, count in (
                ("gateways", progress.gateways_behind),
                ("decoders", progress.decoders_silent),
            )
            if count
        ]
        if not silent:
            return ""
        return f"Not known: {' and '.join(silent)} did not say within {self._limits.wait_s:g} s that this was done."

    async def _until_followed(self, version: int, lora_id: str = "") -> AdapterProgress:
        """Waits for all gateways and, for an adapter, all decoders."""
        until = monotonic() + self._limits.wait_s
        await self._directory.refresh()
        while True:
            progress = await self._registry.progress(version, lora_id)
            if progress.failures or not (progress.gateways_behind or progress.decoders_silent):
                return progress
            if monotonic() > until:
                log.warning(
                    "not all have followed a change of adapters",
                    gateways=progress.gateways_behind,
                    decoders=progress.decoders_silent,
                )
                return progress
            await asyncio.sleep(_LOOK_S)


def _require(**fields: str) -> None:
    """Raises InvalidRequest for the first field that is empty."""
    for field, value in fields.items():
        if not value:
            needed = " and ".join(f"'{name}'" for name in fields)
            raise InvalidRequest(
                "INVALID_VALUE", f"{field} is missing: {needed} must be provided", field=field
            )
