"""Adapters that are loaded while the system runs: where decoders find them, and what became of them there."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable

import structlog

from services.scheduler.decoders.link import DecoderLink
from shared.errors import Unavailable
from shared.queue.adapters import AdapterDirectory, AdapterRegistry

log = structlog.get_logger(__name__)


class AdapterLoads:
    """Has every decoder of this scheduler read what is registered while it has places, so that a registration is
    answered with what became of it; whatever has no place is read when a request asks for it."""

    def __init__(self, registry: AdapterRegistry, directory: AdapterDirectory) -> None:
        self._registry = registry
        self._directory = directory
        self._outcomes: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()

    async def run(self, links: Collection[DecoderLink]) -> None:
        """Works until cancelled. links: those of now, whenever it is looked at."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(links))
            group.create_task(self._report())

    def bound(self, link: DecoderLink) -> None:
        """A decoder has come into service: it reads as many as it has places for."""
        known = self._directory.adapters
        latest = sorted(known.names, key=known.since.__getitem__, reverse=True)
        digests = dict.fromkeys(known.names[name] for name in latest)
        places = max(1, link.core.capacity.max_adapters)
        for lora_id in list(digests)[:places]:
            link.read_early(lora_id, known.folders[lora_id])

    def folder_of(self, lora_id: str) -> str:
        """Where decoders find it; empty for one that was given at the start, or is not known."""
        return self._directory.adapters.folders.get(lora_id, "")

    async def know(self, lora_ids: Iterable[str], links: Collection[DecoderLink]) -> None:
        """Looks for those that were registered just now, if any of these was: neither known nor given to a decoder at
        its start."""
        unknown = set(lora_ids) - {"", *self._directory.adapters.folders}
        if unknown.difference(*(link.core.capacity.adapters for link in links)):
            with contextlib.suppress(Unavailable):
                await self._directory.refresh()

    def note(self, link: DecoderLink, lora_id: str, why_not: str) -> None:
        """What became of an adapter at a decoder; `why_not` is empty where it is there."""
        self._outcomes.put_nowait((lora_id, link.member.instance_id, why_not))

    async def _follow(self, links: Collection[DecoderLink]) -> None:
        before = self._directory.adapters
        while True:
            now = self._directory.adapters
            new = [name for name, since in now.since.items() if before.since.get(name) != since]
            for lora_id in dict.fromkeys(now.names[name] for name in new):
                for link in list(links):
                    link.read_early(lora_id, now.folders[lora_id])
            before = now
            await self._directory.changed()

    async def _report(self) -> None:
        while True:
            lora_id, decoder_id, why_not = await self._outcomes.get()
            try:
                await self._registry.report(lora_id, decoder_id, why_not)
            except Unavailable as error:
                log.warning("an adapter's state is not reported", error=error.message)
