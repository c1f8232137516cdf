"""The registry: each process announces itself in Redis, each caller keeps a list of the live instances that it
calls.
"""

import asyncio
import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import structlog
from redis.asyncio import Redis

from shared.environment import monotonic
from shared.errors import Unavailable
from shared.net import supervise
from shared.net.redis.connection import connection_of
from shared.net.supervise import Background
from shared.queue.keys import Keys
from shared.queue.scripts import Scripts
from shared.telemetry.outage import Outage

log = structlog.get_logger(__name__)

_RENEW_S = 0.5
_LOOK_S = 0.05  # in an empty directory, while a system starts
_STARTING_S = 20.0
_TTL_MS = 2_500
_FORGET_MS = 60_000
_PATIENCE_S = 2.0  # for the others to announce themselves again after Redis was away
# All loops of a process find out at once that Redis is away: one of them says so.
_outages: WeakKeyDictionary[Redis, Outage] = WeakKeyDictionary()

# What a process does at the moment: numbers by name.
Load = Mapping[str, int | float]


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One live process: its incarnation and its gRPC target."""

    instance_id: str
    address: str
    numerics: str = (
        ""  # of a vision encoder: what the bits of its rows depend on (`shared/numerics.py`)
    )


def members_of(flat: Sequence[bytes]) -> list[Member]:
    """What the script `members` answers, as members."""
    return [
        Member(str(i, "ascii"), str(a, "utf-8"), str(n, "ascii"))
        for i, a, n in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


class RegistryLoop(ABC):
    """A background task that repeats one step every half second or sooner, also after failures of Redis."""

    def __init__(self, redis: Redis) -> None:
        self._task: Background | None = None
        self._outage = _outages.setdefault(redis, Outage(log, "Redis is away", "Redis is back"))

    @abstractmethod
    async def _once(self) -> None:
        """One step."""

    def _pause_s(self) -> float:
        """Seconds until the next step."""
        return _RENEW_S

    async def __aenter__(self) -> Self:
        with contextlib.suppress(Unavailable):
            await self._once()
        self._task = Background(f"registry {type(self).__name__.lower()}", self._repeat)
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(self._task)
        self._outage.leave(self)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s())
            try:
                await self._once()
                self._outage.over(self)
            except Unavailable as error:
                self._outage.note(error.message, self)


class Announcement(RegistryLoop):
    """Keeps one process in the registry while it is entered, and takes it out at the end."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        service: str,
        instance_id: str,
        address: str,
        part: str = "",
        content: bytes = b"",
        numerics: str = "",
        load: Callable[[], Load] | None = None,
    ) -> None:
        """`part`: what it says of the part of the model that it serves (`ServedPart.to_json`). `content`: of a decoder,
        the digest of its weights; they were loaded just now. `numerics`: as `Member` has them. `load`: what it does at
        the moment, asked for at each announcement, on the event loop.
        """
        super().__init__(redis)
        self._content = content.hex()
        self._numerics = numerics
        self._load = load
        self._loaded_at = monotonic()
        self._part = part
        self._scripts = Scripts(redis, keys.prefix)
        self._service = service
        self._instance_id = instance_id
        self._address = address

    async def _once(self) -> None:
        await self._scripts.call(
            "announce",
            self._service,
            self._instance_id,
            self._address,
            _TTL_MS,
            _FORGET_MS,
            self._part,
            self._content,
            round(1000 * (monotonic() - self._loaded_at)),
            self._numerics,
            json.dumps(self._load()) if self._load is not None else "",
        )

    async def __aenter__(self) -> Self:
        # By this name timelines of requests call the process.
        log.info("announced", replica=self._instance_id, address=self._address)
        return await super().__aenter__()

    async def withdraw(self) -> None:
        """Leaves the registry now: callers stop coming within half a second."""
        await super().__aexit__()
        with contextlib.suppress(Unavailable):
            await self._scripts.call("announce", self._service, self._instance_id, "", 0, 0)

    async def __aexit__(self, *_: object) -> None:
        await self.withdraw()


class Directory(RegistryLoop):
    """The live members of one service, refreshed every half second; more often in the first 20 s while there are
    none.

    Keeps the last list while Redis is away, and for two seconds longer: no member could announce itself meanwhile,
    and Redis may have restarted with older data.
    """

    def __init__(self, redis: Redis, keys: Keys, service: str) -> None:
        super().__init__(redis)
        self._scripts = Scripts(redis, keys.prefix)
        self._runs = connection_of(redis).runs
        self._prefix = keys.prefix
        self._service = service
        self._changed = asyncio.Event()
        self._restarts = 0
        self._began = self._read_at = 0.0
        self._patient_until = 0.0
        self.members: tuple[Member, ...] = ()

    async def _once(self) -> None:
        flat = await self._scripts.call("members", self._service)
        members = tuple(members_of(flat))
        now = asyncio.get_running_loop().time()
        self._began = self._began or now
        restarts = self._runs.count(self._prefix)
        if restarts > self._restarts or (self._read_at and now - self._read_at > 2 * _RENEW_S):
            self._patient_until = now + _PATIENCE_S
        self._restarts, self._read_at = restarts, now
        if now < self._patient_until:
            members = tuple(sorted({*self.members, *members}))
        if members != self.members:
            self.members = members
            self._changed.set()
            self._changed = asyncio.Event()

    def _pause_s(self) -> float:
        young = asyncio.get_running_loop().time() - self._began < _STARTING_S
        return _LOOK_S if young and not self.members else _RENEW_S

    async def changed(self) -> None:
        """Waits until the list changes."""
        await self._changed.wait()

    def pick(self, digest: bytes) -> list[Member]:
        """All members in the order in which `digest` prefers them (rendezvous hashing, Thaler and Ravishankar 1998)."""
        return sorted(
            self.members,
            key=lambda m: hashlib.blake2b(digest + m.instance_id.encode(), digest_size=8).digest(),
        )
