"""Has media items encoded: one call for a digest, at the encoder that it prefers, the next one if that is gone."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import structlog
from google.protobuf.duration_pb2 import Duration

from shared import numerics as texts
from shared.artifacts.embedding_name import embedding_name
from shared.errors import Expired, NotFound, Overloaded, ServingError, Unavailable
from shared.net import tasks
from shared.net.channels import Channels
from shared.net.rpc.errors import calling
from shared.net.single_flight import SingleFlight
from shared.queue import TakenRequest
from shared.queue.registry import Directory, Member
from shared.telemetry import request_names
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import MediaItem
from tessera.vision_encoder.v1.vision_encoder_pb2 import (
    EncodeRequest,
    EncodeResponse,
    ReleaseRequest,
)
from tessera.vision_encoder.v1.vision_encoder_pb2_grpc import VisionEncoderServiceStub

if TYPE_CHECKING:
    from tessera.vision_encoder.v1.vision_encoder_pb2_grpc import VisionEncoderServiceAsyncStub

log = structlog.get_logger(__name__)

_RETENTION_S = 60
_CALL_TIMEOUT_S = 60
_BUSY_WAIT_S = 0.05
# Encoders of an item's numerics that fail for so long are given up for others, for a while.
_OTHERS_AFTER_S = 3.0
_AVOIDED_S = 10.0
_PATIENCE_S = 120.0  # a restart on a machine that has too much to do took 38
# Of what else than embeddings fills shared memory, nobody knows when it goes.
_SPACE_PATIENCE_S = 20.0
_NO_SPACE = "ARTIFACT_SPACE"
_OTHER_CONTENT = "OTHER_CONTENT"  # the encoder's weights are not those of the decoder
_MEDIA_EXPIRED = "MEDIA_EXPIRED"  # the raw bytes are gone from the store: no encoder can help


class NumericsGone(Unavailable):
    """No encoder of the wanted numerics can be had, but one of others: what waits for the item must name it anew."""

    def __init__(self) -> None:
        super().__init__(
            "NO_VISION_ENCODER", "no vision encoder with the numerics of the embeddings is running"
        )


class Encoders:
    """The vision encoders, called by digest.

    Users, each with an id of its own, are the decoders' links. Calls of several for the same item and weights are one,
    and an encoder is asked to release an item when the last of them has. An encoder whose weights are not those of the
    decoder is passed over. Encoders of different numerics do not stand in for each other: each name of embeddings says
    whose they are, and requests whose encoders are gone take others' names.
    """

    def __init__(self, directory: Directory, patience_s: float = _PATIENCE_S) -> None:
        """`patience_s`: how long an item waits while no encoder can be had."""
        self.num_failed = 0  # calls so far
        self._directory = directory
        self._patience_s = patience_s
        self._channels = Channels()
        self._running: SingleFlight[bytes, ArtifactRef] = SingleFlight()
        self._users: dict[bytes, set[str]] = {}
        self._holders: dict[bytes, Member] = {}
        self._answers: dict[bytes, EncodeResponse] = {}
        # Those whose result was lost on the way to a decoder, which may be cut off from them.
        self._failed: dict[bytes, set[Member]] = {}
        self._others: dict[tuple[Member, bytes], None] = {}  # and contents that are not theirs
        self._avoided: dict[str, float] = {}  # numerics whose encoders all failed, and until when
        self._background: dict[asyncio.Task[None], None] = {}

    @property
    def num_running(self) -> int:
        """Items that are being encoded, or wait for an encoder."""
        return len(self._running)

    def numerics_for(self, taken: TakenRequest) -> str:
        """Of the encoders that a request's media are to be encoded by: those that it has begun with, as long as there
        are any, else those that its first item prefers. Empty where nothing is known."""
        media = taken.spec.media
        if not media:
            return ""
        fit = self._fitting(media[0].digest, bytes.fromhex(taken.content))
        now = asyncio.get_running_loop().time()
        usual = [m for m in fit if self._avoided.get(m.numerics, 0.0) <= now] or fit
        begun_in = texts.of_encoder(taken.numerics)
        if not usual or any(m.numerics == begun_in for m in usual):
            return begun_in
        return usual[0].numerics

    async def encode(
        self, item: MediaItem, user: str, content: bytes = b"", numerics: str = ""
    ) -> ArtifactRef:
        """The item's embeddings, by an encoder with this content and these numerics.

        A full encoder is waited for; one that is gone is passed over, and if all are gone they are waited for,
        for a while. Raises NumericsGone where there are only encoders of other numerics, Unavailable when no encoder
        can be had, or what the encoder said is wrong with the item.
        """
        name = embedding_name(content, item.digest, numerics)
        users = self._users.setdefault(name, set())
        holder = self._holders.get(name)
        if user in users and holder is not None:  # it asks again: it could not fetch the result
            self._failed.setdefault(name, set()).add(holder)
        users.add(user)
        return await self._running.run(name, lambda: self._encode(item, name, content, numerics))

    def how(self, name: bytes) -> tuple[Member, EncodeResponse] | None:
        """Who has encoded an item that is not released yet, and what it said of that."""
        holder, answer = self._holders.get(name), self._answers.get(name)
        return None if holder is None or answer is None else (holder, answer)

    def release(self, digests: Iterable[bytes], user: str) -> None:
        """A user does not need the embeddings of these names any more. Work that no user needs is cancelled, and the
        encoder with the result is asked to release it. Returns at once; a lost call only costs cache.
        """
        by_member: dict[Member, list[bytes]] = {}
        for digest in digests:
            users = self._users.get(digest, set())
            users.discard(user)
            if users:
                continue
            self._users.pop(digest, None)
            self._failed.pop(digest, None)
            self._running.cancel(digest)
            holder = self._holders.pop(digest, None)
            self._answers.pop(digest, None)
            if holder is not None:
                by_member.setdefault(holder, []).append(digest)
        for member, held in by_member.items():
            task = asyncio.create_task(self._release(member, held))
            self._background[task] = None
            task.add_done_callback(lambda done: self._background.pop(done))

    def release_all(self, user: str) -> None:
        """The user is gone."""
        self.release([digest for digest, users in self._users.items() if user in users], user)

    async def close(self) -> None:
        """Ends what is under way."""
        await self._running.close()
        await tasks.end(*self._background)
        await self._channels.close()

    async def _encode(
        self, item: MediaItem, name: bytes, content: bytes, numerics: str
    ) -> ArtifactRef:
        request = EncodeRequest(
            media=item,
            retention=Duration(seconds=_RETENTION_S),
            content=content,
            numerics=numerics,
        )
        problem: ServingError = Unavailable("NO_VISION_ENCODER", "no vision encoder is running")
        loop = asyncio.get_running_loop()
        began, deadline = loop.time(), self._late()
        answered = began  # when one was full at the latest
        told: set[Member] = set()  # of whose failure a line was logged
        while loop.time() < deadline:
            failed = self._failed.get(name, ())
            fit = self._fitting(name, content)
            members = [m for m in fit if m.numerics == numerics]
            if len(fit) > len(members) and (
                not members or loop.time() - answered > _OTHERS_AFTER_S
            ):
                self._avoided[numerics] = loop.time() + _AVOIDED_S
                raise NumericsGone()
            for member in sorted(members, key=lambda m: m in failed):
                try:
                    with self._calling(member) as stub:
                        answer = await stub.Encode(
                            request, timeout=_CALL_TIMEOUT_S, metadata=request_names.metadata()
                        )
                except Overloaded as error:
                    problem = error
                    answered = loop.time()
                    full = error.reason == _NO_SPACE
                    deadline = min(deadline, began + _SPACE_PATIENCE_S) if full else self._late()
                    break  # the same one again: another would encode what this one has or will have
                except (Unavailable, NotFound, Expired) as error:
                    if error.reason == _MEDIA_EXPIRED:
                        raise
                    if error.reason == _OTHER_CONTENT:
                        log.warning("an encoder has other weights", encoder=member.instance_id)
                        self._note_other(member, content)
                        problem = Unavailable(
                            "NO_VISION_ENCODER",
                            "no vision encoder with the weights of the decoder is running",
                        )
                        continue
                    self.num_failed += 1
                    if member not in told:
                        told.add(member)
                        log.warning(
                            "encode failed, trying on",
                            encoder=member.instance_id,
                            error=error.message,
                        )
                    problem = error
                else:
                    self._holders[name], self._answers[name] = member, answer
                    return answer.embeddings
            await asyncio.sleep(_BUSY_WAIT_S)
        raise problem

    def _fitting(self, name: bytes, content: bytes) -> list[Member]:
        """The encoders that may have this content, in the order in which the name prefers them."""
        return [m for m in self._directory.pick(name) if (m, content) not in self._others]

    def _note_other(self, member: Member, content: bytes) -> None:
        """An encoder keeps its weights for as long as it runs."""
        present = set(self._directory.members)
        self._others = {pair: None for pair in self._others if pair[0] in present}
        self._others[member, content] = None

    def _late(self) -> float:
        """When an item that waits from now on has waited too long."""
        return asyncio.get_running_loop().time() + self._patience_s

    async def _release(self, member: Member, digests: list[bytes]) -> None:
        try:
            with self._calling(member) as stub:
                await stub.Release(ReleaseRequest(digests=digests), timeout=5)
        except ServingError as error:
            log.debug("release failed", encoder=member.instance_id, error=error.message)

    @contextlib.contextmanager
    def _calling(self, member: Member) -> Iterator["VisionEncoderServiceAsyncStub"]:
        with self._channels.use(member.address) as channel, calling("vision_encoder"):
            yield VisionEncoderServiceStub(channel)
