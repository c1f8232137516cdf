"""LoRA adapters that are loaded while a system runs: which names are served by which weights, for all its processes.

Weights are named by their digest (`LoraAdapter.lora_id`). A name may get others; requests keep the digest that the name
had when they were admitted, and the folder of a digest stays known when no name has it any more.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from redis.asyncio import Redis

from shared.errors import InvalidRequest, NotFound
from shared.net.redis.connection import connection_of
from shared.queue.keys import Keys
from shared.queue.registry import RegistryLoop
from shared.queue.scripts import Scripts

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RegisteredAdapters:
    """What is served at a version. `names`: digest by name; `since`: by name the version of its last change; `folders`:
    by digest, of adapters without a name too."""

    version: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    since: Mapping[str, int] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdapterProgress:
    """How far a change has come: live gateways that do not serve by it yet, live decoders that have not said what
    became of the adapter, and why others could not load it."""

    gateways_behind: int
    decoders_silent: int
    failures: tuple[str, ...]


class AdapterRegistry:
    """The adapters of one model. All methods raise Unavailable when Redis is away or refuses to write."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self._scripts = Scripts(redis, keys.prefix)
        self._runs = connection_of(redis).runs
        self._prefix = keys.prefix

    @property
    def restarts(self) -> int:
        """How often Redis was found to be another run, which may have lost its last writes."""
        return self._runs.count(self._prefix)

    async def put(self, name: str, lora_id: str, folder: str, *, in_place: bool) -> int:
        """Serves an adapter by a name. Returns the version from which on it is served. Raises InvalidRequest where an
        adapter has the name and is not to be replaced (`in_place`)."""
        answer = await self._scripts.call(
            "adapter_set", name, lora_id, folder, "1" if in_place else "0"
        )
        if answer[0] == b"TAKEN":
            raise InvalidRequest(
                "ADAPTER_LOADED",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True.",
                field="lora_name",
            )
        return int(answer[1])

    async def keep_folder(self, lora_id: str, folder: str) -> None:
        """Notes where an adapter is that has no name any more, unless that is known."""
        await self._scripts.call("adapter_set", "", lora_id, folder, "0")

    async def remove(self, name: str) -> int:
        """Serves nothing by a name any more. Returns the version from which on. Raises NotFound."""
        answer = await self._scripts.call("adapter_set", name, "", "", "0")
        if answer[0] == b"MISSING":
            raise NotFound(
                "ADAPTER_NOT_FOUND",
                f"The lora adapter '{name}' cannot be found.",
                field="lora_name",
            )
        return int(answer[1])

    async def read(self, known: int = -1, gateway: str = "") -> RegisteredAdapters | None:
        """What is served; None where that is what the caller knows. `gateway`: which serves by it."""
        version, *rest = await self._scripts.call("adapters", known, gateway)
        if not rest:
            return None
        names = dict(_split_pairs(rest[0]))
        folders = dict(_split_pairs(rest[1]))
        return RegisteredAdapters(
            version=int(version),
            names={name: lora_id for name, (lora_id, _) in names.items()},
            since={name: int(since) for name, (_, since) in names.items()},
            folders={lora_id: folder for lora_id, (_, folder) in folders.items()},
        )

    async def report(self, lora_id: str, decoder_id: str, why_not: str = "") -> None:
        """Notes that a decoder has an adapter, or why it could not load it."""
        await self._scripts.call("adapter_report", lora_id, decoder_id, why_not)

    async def progress(self, version: int, lora_id: str = "") -> AdapterProgress:
        """How far a change has come; without a digest at the gateways alone."""
        behind, silent, failures = await self._scripts.call("adapter_progress", lora_id, version)
        return AdapterProgress(int(behind), int(silent), tuple(f.decode() for f in failures))


class AdapterDirectory(RegistryLoop):
    """What is served, refreshed every half second. Keeps the last while Redis is away, and puts back what Redis has
    lost in a restart."""

    def __init__(
        self,
        registry: AdapterRegistry,
        gateway: str = "",
        serve: Callable[[RegisteredAdapters], None] = lambda found: None,
    ) -> None:
        """gateway: the id of the one that serves by it, empty in other services. `serve` is called with each change."""
        super().__init__(registry.redis)
        self._registry = registry
        self._gateway = gateway
        self._serve = serve
        self._changed = asyncio.Event()
        self._restarts = 0
        self.adapters = RegisteredAdapters()

    async def refresh(self) -> bool:
        """Looks now. Returns whether anything has changed. Raises Unavailable."""
        before = self.adapters
        await self._once()
        return self.adapters is not before

    async def changed(self) -> None:
        """Waits until what is served changes."""
        await self._changed.wait()

    async def _once(self) -> None:
        found = await self._registry.read(self.adapters.version, self._gateway)
        if (restarts := self._registry.restarts) > self._restarts:
            found = await self._put_back(found)
            self._restarts = restarts
        if found is None:
            return
        self.adapters = found
        self._serve(found)
        self._changed.set()
        self._changed = asyncio.Event()
        if self._gateway:  # says that it serves by this version
            await self._registry.read(found.version, self._gateway)

    async def _put_back(self, found: RegisteredAdapters | None) -> RegisteredAdapters | None:
        found = found or await self._registry.read()
        assert found is not None
        known = self.adapters
        if found.version > known.version:  # others have put it back, or gone on
            return found
        lost = [name for name in known.names if name not in found.names]
        for name in lost:
            lora_id = known.names[name]
            try:
                await self._registry.put(name, lora_id, known.folders[lora_id], in_place=False)
            except InvalidRequest:
                continue  # another one was faster
        for lora_id in known.folders.keys() - found.folders.keys():
            await self._registry.keep_folder(lora_id, known.folders[lora_id])
        if lost:
            log.warning("redis had lost adapters, which are served again", names=lost)
        return await self._registry.read()


def _split_pairs(flat: list[bytes]) -> list[tuple[str, tuple[str, str]]]:
    """Of keys and values, each of two words, the second of which may have spaces."""
    texts = [text.decode() for text in flat]
    return [
        (key, (value.partition(" ")[0], value.partition(" ")[2]))
        for key, value in zip(texts[::2], texts[1::2], strict=True)
    ]
