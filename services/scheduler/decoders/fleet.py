"""The decoders of this scheduler: leased, bound, served, lost, and given to a scheduler that has none."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

import structlog

from services.scheduler.core.router import Router
from services.scheduler.decoders.link import DecoderLink
from shared.environment import monotonic
from shared.errors import ServingError, Superseded, Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue import Queue
from shared.queue.registry import Directory, Member

log = structlog.get_logger(__name__)

_RETRY_LEASE_S = 0.2
_SERVED_S = 1.0  # a link that lasted so long had come about
# What answers at the address of a decoder whose process has ended: the next one there, which announces itself.
_OF_ITS_SUCCESSOR = ("STARTING", "WRONG_DECODER")
_CEDED_S = 5.0  # how long another scheduler has the first call on what was given to it


class Fleet:
    """A keeper for each decoder in the registry, which tries to lease it and then serves it until the link breaks.

    `open_link(member, lease)` makes a link; `on_bound(link)` is called with a new one, `on_lost(link)` with an ended
    one.
    """

    def __init__(
        self,
        queue: Queue,
        directory: Directory,
        scheduler_id: str,
        *,
        open_link: Callable[[Member, int], DecoderLink],
        on_bound: Callable[[DecoderLink], None],
        on_lost: Callable[[DecoderLink], None],
    ) -> None:
        self.links: dict[str, DecoderLink] = {}
        self._routers: dict[str, Router[DecoderLink]] = {}  # by content
        self._queue = queue
        self._directory = directory
        self._scheduler_id = scheduler_id
        self._open_link = open_link
        self._on_bound = on_bound
        self._on_lost = on_lost
        self._keepers: dict[str, Background] = {}
        self._closing = False
        self._ceded: dict[str, float] = {}  # decoder -> until when it is left to others
        self._without: set[str] = set()  # schedulers that had no decoder at the last look
        # Fingerprint and block size that all decoders share, whatever their content.
        self._model: tuple[bytes, int] | None = None

    def router(self, content: str) -> Router[DecoderLink] | None:
        """The choice among the decoders with these weights; None where there are none."""
        return self._routers.get(content)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            for member in self._directory.members:
                if member.instance_id not in self._keepers:
                    keeper = Background("keeper of a decoder", partial(self._keep, member))
                    self._keepers[member.instance_id] = keeper
            await self._directory.changed()

    async def finish_steps(self, timeout_s: float) -> None:
        """Leases no more, and lets what is under way come to its end."""
        self._closing = True
        links = list(self.links.values())
        await asyncio.gather(*(link.finish_steps(timeout_s) for link in links))

    async def close(self) -> None:
        """Ends all links."""
        self._closing = True
        await supervise.end(*self._keepers.values())

    async def share(self, others: Collection[str]) -> None:
        """Where another live scheduler has no decoder and this one has the most, the least loaded one is given away:
        it is emptied first, and freed then. Called about once a second. Raises Unavailable."""
        given = [link for link in self.links.values() if link.is_given_away]
        if not others or (len(self.links) < 2 and not given):
            self._without = set()
            return
        holders = Counter((await self._queue.leases()).values())
        without = {sid for sid in others if not holders[sid]}
        if not without:
            for link in given:
                link.is_given_away = False
        elif not given and without & self._without and self._has_most(holders):
            link = min(self.links.values(), key=lambda link: link.core.state.num_sequences)
            log.info("giving a decoder away", decoder=link.member.instance_id)
            link.is_given_away = True
        self._without = without

    def _has_most(self, holders: "Counter[str]") -> bool:
        """Of equal ones the first by name: only one gives."""
        most = min(holders, key=lambda sid: (-holders[sid], sid), default="")
        return most == self._scheduler_id and len(self.links) > 1

    async def _keep(self, member: Member) -> None:
        """Keeps a link to a decoder for as long as it is in the registry."""
        said = ""
        did = member.instance_id
        while not self._closing and member in self._directory.members:
            began = monotonic()
            try:
                if began >= self._ceded.get(did, began):
                    await self._lease(member)
            except Superseded as error:
                log.warning("decoder lost", decoder=did, error=error.message)
            except ServingError as error:
                # Until its place in the registry ends, a dead one is tried five times a second: that is said once.
                if monotonic() - began > _SERVED_S:
                    log.warning("decoder lost", decoder=did, error=error.message)
                elif error.reason in _OF_ITS_SUCCESSOR:
                    log.debug("decoder has been started again", decoder=did, error=error.message)
                elif error.message != said:
                    log.warning("decoder cannot be bound", decoder=did, error=error.message)
                said = error.message
            await asyncio.sleep(_RETRY_LEASE_S)
        self._keepers.pop(did, None)
        self._ceded.pop(did, None)

    async def _lease(self, member: Member) -> None:
        lease = await self._queue.lease_decoder(member.instance_id, self._scheduler_id)
        if not lease:
            return
        link = self._open_link(member, lease)
        try:
            await self._serve(link)
        finally:
            if link.is_given_away and not self._closing:
                self._ceded[member.instance_id] = monotonic() + _CEDED_S
                await self._queue.free_decoder(member.instance_id, self._scheduler_id)

    async def _serve(self, link: DecoderLink) -> None:
        did = link.member.instance_id
        try:
            await link.open()
            self._check_model(link)
            log.info(
                "decoder bound",
                decoder=did,
                host=link.hello.host,
                blocks=link.hello.num_blocks,
                max_model_len=link.hello.max_model_len,
                step_ms=round(link.hello.step_us / 1000, 2),
                token_ms=round(link.hello.token_us / 1000, 3),
                kept_blocks=len(link.hello.sealed_blocks) // 4,
                ranks=link.hello.ranks or 1,
                content=link.content,
                numerics=link.numerics,
            )
            self.links[did] = link
            self._routers.setdefault(link.content, Router()).add(link)
            self._on_bound(link)
            await link.run()
        finally:
            self.links.pop(did, None)
            self._remove_route(link)
            self._on_lost(link)
            await asyncio.shield(link.close())

    def _remove_route(self, link: DecoderLink) -> None:
        router = self._routers.get(link.content)
        if router is not None:
            router.remove(link)
            if all(other.content != link.content for other in self.links.values()):
                del self._routers[link.content]

    def _check_model(self, link: DecoderLink) -> None:
        found = (link.hello.model_fingerprint, link.hello.block_size)
        if self._model is None or not self.links:
            self._model = found
        if found != self._model:
            raise Unavailable(
                "DECODERS_DIFFER",
                "this decoder has another model, dtype or block size than those in service",
            )
