"""The scheduler's calls of encoders that are full, gone, or not needed any more. Real gRPC, simulated encoders."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.scheduler.encoders import Encoders, NumericsGone
from shared.artifacts.embedding_name import embedding_name
from shared.errors import NotFound, Overloaded, ServingError, Unavailable
from shared.net.rpc.server import RpcServer
from shared.queue import TakenRequest
from shared.queue.keys import new_instance_id
from shared.queue.registry import Announcement, Directory
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import MediaItem
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tessera.vision_encoder.v1 import vision_encoder_pb2_grpc
from tessera.vision_encoder.v1.vision_encoder_pb2 import EncodeResponse, ReleaseResponse
from tests.support.scheduler_bench import Bench

ITEM = MediaItem(digest=b"i" * 16, rows=4)


class PlayedEncoder(vision_encoder_pb2_grpc.VisionEncoderServiceServicer):
    """Answers when its gate is open, or fails."""

    def __init__(self) -> None:
        self.content = b""
        self.calls = 0
        self.released: list[bytes] = []
        self.failure: ServingError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def Encode(self, request: Any, context: Any) -> EncodeResponse:
        self.calls += 1
        if self.content and request.content != self.content:
            raise NotFound("OTHER_CONTENT", "it has other weights")
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        name = embedding_name(request.content, request.media.digest, request.numerics)
        return EncodeResponse(embeddings=ArtifactRef(digest=name))

    async def Release(self, request: Any, context: Any) -> ReleaseResponse:
        self.released += request.digests
        return ReleaseResponse()


@contextlib.asynccontextmanager
async def started(bench: Bench, numerics: str = "") -> AsyncIterator[PlayedEncoder]:
    played = PlayedEncoder()
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:
        server.add(
            "tessera.vision_encoder.v1.VisionEncoderService",
            vision_encoder_pb2_grpc.add_VisionEncoderServiceServicer_to_server,
            played,
        )
        await server.ready()
        name = new_instance_id()
        announcement = Announcement(
            bench.redis,
            bench.keys,
            "vision_encoder",
            name,
            server.address,
            numerics=numerics,
        )
        async with announcement:
            yield played


@contextlib.asynccontextmanager
async def opened(bench: Bench, patience_s: float) -> AsyncIterator[Encoders]:
    async with Directory(bench.redis, bench.keys, "vision_encoder") as directory:
        made = Encoders(directory, patience_s)
        yield made
        await made.close()


@pytest.fixture
async def encoders(bench: Bench) -> AsyncIterator[Encoders]:
    async with opened(bench, patience_s=60) as made:
        yield made


async def test_an_encoder_that_dies_is_passed_over(bench: Bench, encoders: Encoders) -> None:
    async with started(bench) as one, started(bench) as other:
        one.failure = Unavailable("GONE", "it was killed")
        other.failure = NotFound("ARTIFACT_GONE", "no pixels")
        call = asyncio.create_task(encoders.encode(ITEM, "1"))
        while not (one.calls and other.calls):
            await asyncio.sleep(0.01)
        assert not call.done()
        other.failure = None
        assert (await call).digest == ITEM.digest


async def test_an_encoder_whose_results_get_lost_is_asked_last(
    bench: Bench, encoders: Encoders
) -> None:
    async with started(bench) as one, started(bench) as other:
        while len(encoders._directory.members) < 2:
            await encoders._directory.changed()
        await encoders.encode(ITEM, "1")
        assert one.calls + other.calls == 1
        await encoders.encode(ITEM, "1")
        assert one.calls == other.calls == 1


async def test_a_full_encoder_is_waited_for_longer_than_an_absent_one(bench: Bench) -> None:
    async with started(bench) as played, opened(bench, patience_s=2.0) as encoders:
        played.failure = Overloaded("ENCODER_CACHE_FULL", "full", retry_after_s="1")
        call = asyncio.create_task(encoders.encode(ITEM, "1"))
        await asyncio.sleep(2.5)
        assert not call.done()
        played.failure = None
        assert await call


async def test_without_any_encoder_the_error_says_so(bench: Bench) -> None:
    async with opened(bench, patience_s=0.2) as encoders:
        with pytest.raises(Unavailable) as caught:
            await encoders.encode(ITEM, "1")
    assert caught.value.reason == "NO_VISION_ENCODER"


async def test_expired_media_fail_at_once(bench: Bench, encoders: Encoders) -> None:
    async with started(bench) as played:
        played.failure = NotFound("MEDIA_EXPIRED", "send it again")
        with pytest.raises(NotFound):
            await encoders.encode(ITEM, "1")
        assert played.calls == 1


async def test_an_item_is_held_until_its_last_user_releases_it(
    bench: Bench, encoders: Encoders
) -> None:
    async with started(bench) as played:
        await asyncio.gather(encoders.encode(ITEM, "1"), encoders.encode(ITEM, "2"))
        assert played.calls == 1
        encoders.release([ITEM.digest], "1")
        await asyncio.sleep(0.1)
        assert not played.released
        encoders.release_all("2")
        while played.released != [ITEM.digest]:
            await asyncio.sleep(0.01)


async def test_an_item_without_users_is_not_tried_again(bench: Bench, encoders: Encoders) -> None:
    async with started(bench) as played:
        played.failure = Overloaded("ENCODER_CACHE_FULL", "full", retry_after_s="1")
        call = asyncio.create_task(encoders.encode(ITEM, "1"))
        while not played.calls:
            await asyncio.sleep(0.01)
        calls = played.calls + 1
        played.gate.clear()
        while played.calls < calls:  # the next try has come, and no other is on its way
            await asyncio.sleep(0.01)
        encoders.release([ITEM.digest], "1")
        with pytest.raises(asyncio.CancelledError):
            await call
        played.failure = None
        played.gate.set()
        await asyncio.sleep(0.2)
        assert played.calls == calls
        assert await encoders.encode(ITEM, "1"), "another request may want it later"


async def test_an_item_is_encoded_with_the_weights_of_the_decoder_that_needs_it(
    bench: Bench,
) -> None:
    async with started(bench) as old, started(bench) as new, opened(bench, 60) as encoders:
        old.content, new.content = b"old", b"new"
        for digest in (b"i" * 16, b"j" * 16, b"k" * 16):
            item = MediaItem(digest=digest, rows=4)
            made = [
                await encoders.encode(item, content.decode(), content)
                for content in (b"old", b"new")
            ]
            assert [ref.digest for ref in made] == [
                embedding_name(content, digest) for content in (b"old", b"new")
            ]
        # Three items of its own, and at the most one question for the other's.
        assert 3 <= old.calls <= 4 and 3 <= new.calls <= 4
        async with opened(bench, 1) as impatient:
            with pytest.raises(Unavailable) as caught:
                await impatient.encode(ITEM, "1", b"others")
        assert caught.value.reason == "NO_VISION_ENCODER"
        assert old.calls <= 5 and new.calls <= 5
        encoders.release([embedding_name(b"old", b"i" * 16)], "old")
        async with asyncio.timeout(60):
            while not old.released:
                await asyncio.sleep(0.01)
        assert not new.released


def asking_for(item: MediaItem, begun_in: str = "") -> TakenRequest:
    spec = RequestSpec(request_id="r", media=[item])
    return TakenRequest(spec, 0, 0, (b"",), (None,), numerics=begun_in)


async def test_embeddings_are_asked_of_the_encoders_whose_numerics_are_in_their_name(
    bench: Bench,
) -> None:
    async with (
        started(bench, "one") as one,
        started(bench, "two") as two,
        opened(bench, 60) as encoders,
    ):
        items = [MediaItem(digest=bytes([i]) * 16, rows=4) for i in range(20)]
        chosen = [encoders.numerics_for(asking_for(item)) for item in items]
        assert set(chosen) == {"one", "two"}, "both have something to do"
        for item, numerics in zip(items, chosen, strict=True):
            assert encoders.numerics_for(asking_for(item)) == numerics
            made = await encoders.encode(item, "1", b"w", numerics)
            assert made.digest == embedding_name(b"w", item.digest, numerics)
        assert (one.calls, two.calls) == (chosen.count("one"), chosen.count("two"))
        # What has begun keeps to its own as long as there are any.
        for begun_in in ("one", "two"):
            found = {encoders.numerics_for(asking_for(i, f"d+{begun_in}")) for i in items}
            assert found == {begun_in}
        gone = {encoders.numerics_for(asking_for(i, "d+three")) for i in items}
        assert gone == {"one", "two"}
        assert encoders.numerics_for(TakenRequest(RequestSpec(), 0, 0, (), ())) == ""


async def test_without_encoders_of_its_numerics_an_item_must_be_named_anew(bench: Bench) -> None:
    async with started(bench, "two"), opened(bench, 60) as encoders:
        async with started(bench, "one") as one:
            one.failure = Unavailable("CUT", "it is cut off")
            async with asyncio.timeout(60):
                # It fails for so long, or leaves the registry, and there is another.
                while encoders.numerics_for(asking_for(ITEM, "d+one")) != "one":
                    await asyncio.sleep(0.01)
                with pytest.raises(NumericsGone):
                    await encoders.encode(ITEM, "1", b"w", "one")
            assert encoders.numerics_for(asking_for(ITEM, "d+one")) == "two"
        made = await encoders.encode(ITEM, "1", b"w", "two")
        assert made.digest == embedding_name(b"w", ITEM.digest, "two")


async def test_the_only_encoders_are_waited_for_whatever_their_numerics(bench: Bench) -> None:
    async with opened(bench, 60) as encoders:
        call = asyncio.create_task(encoders.encode(ITEM, "1", b"w", "one"))
        await asyncio.sleep(0.2)
        async with started(bench, "one"):
            made = await asyncio.wait_for(call, 60)
    assert made.digest == embedding_name(b"w", ITEM.digest, "one")
