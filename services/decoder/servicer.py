"""The step stream: which scheduler the decoder is bound to, and how that changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import structlog

from services.decoder.measures import DecoderMeasures
from services.decoder.session import Session
from services.decoder.worker.executor import Executor
from services.decoder.worker.worker import Worker
from shared.errors import InvalidRequest, Precondition, Superseded, Unavailable
from tessera.decoder.v1 import decoder_pb2_grpc
from tessera.decoder.v1.decoder_pb2 import Hello, Open, StepsRequest, StepsResponse

log = structlog.get_logger(__name__)

_OPEN_S = 2.0
_DRAIN_POLL_S = 0.02
_EMPTY_S = 0.5  # sequences of a scheduler that has not yet received the notice may still arrive


class DecoderServicer(decoder_pb2_grpc.DecoderServiceServicer):
    """Binds the decoder to the scheduler with the largest lease seen; `hello` is what never
    changes about the decoder."""

    def __init__(
        self, hello: Hello, worker: Worker, executor: Executor, collector: Executor | None = None
    ) -> None:
        """executor: where plans are launched; collector: see `Session`."""
        self.measures = DecoderMeasures(worker)
        self._hello = hello
        self._worker = worker
        self._executor = executor
        self._collector = collector
        self._largest_lease = 0
        self._session: Session | None = None
        self._handover = asyncio.Lock()
        self._draining = False

    async def Steps(
        self,
        requests: AsyncIterator[StepsRequest],
        context: grpc.aio.ServicerContext[StepsRequest, StepsResponse],
    ) -> AsyncIterator[StepsResponse]:
        """One stream for each lease; see the proto."""
        opening = await _read_open(requests)
        session, hello = await self._bind(opening)
        # A generator that waits in `yield` is closed some time after its call; this is at once.
        context.add_done_callback(lambda _: self._unbind(session))  # type: ignore[arg-type]
        reader = asyncio.create_task(session.read(requests))
        try:
            yield StepsResponse(hello=hello)
            if self._draining:
                session.announce_draining()
            async with contextlib.aclosing(session.responses()) as responses:
                async for response in responses:
                    yield response
        finally:
            reader.cancel()
            self._unbind(session)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new streams, asks the scheduler to move its sequences, and waits until it has closed its stream or
        none is left. After `timeout_s` the stream ends, and the sequences continue on other decoders."""
        self._draining = True
        if self._session is not None:
            self._session.announce_draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until_empty()
        if self._session is not None:
            self._session.end(Unavailable("DECODER_STOPS", "the decoder was told to stop"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EMPTY_S):
                while self._session is not None:  # the scheduler is receiving the error
                    await asyncio.sleep(_DRAIN_POLL_S)

    async def _until_empty(self) -> None:
        loop = asyncio.get_running_loop()
        empty_since = loop.time()
        while self._session is not None and loop.time() - empty_since < _EMPTY_S:
            await asyncio.sleep(_DRAIN_POLL_S)
            if not self._worker.slots.empty:
                empty_since = loop.time()

    async def _bind(self, opening: Open) -> tuple[Session, Hello]:
        """Ends the older stream, lets its running step finish, forgets its sequences."""
        async with self._handover:
            if opening.decoder_id != self._hello.decoder_id:
                raise Precondition(
                    "WRONG_DECODER",
                    f"this is decoder {self._hello.decoder_id}, not {opening.decoder_id}",
                )
            if self._draining:
                raise Unavailable("DECODER_STOPS", "the decoder was told to stop")
            if opening.lease <= self._largest_lease:
                raise Precondition(
                    "STALE_LEASE",
                    f"lease {opening.lease} is not larger than {self._largest_lease}",
                )
            self._largest_lease = opening.lease
            session = Session(
                opening.lease, self._worker, self._executor, self.measures, self._collector
            )
            older, self._session = self._session, session
            if older is not None:
                older.end(Superseded("NEWER_LEASE", f"lease {opening.lease} took over"))
            kept = await self._executor.run(self._start_over)
        self.measures.bindings += 1
        self.measures.is_bound = True
        log.info("scheduler bound", scheduler=opening.scheduler_id, lease=opening.lease)
        hello = Hello()
        hello.CopyFrom(self._hello)
        (hello.sealed_blocks, hello.sealed_hashes), loaded = kept
        hello.adapters.extend(loaded)
        hello.loaded_adapters.extend(loaded)
        return session, hello

    def _unbind(self, session: Session) -> None:
        session.close()
        if self._session is session:
            self._session = None
            self.measures.is_bound = False
            # Nobody can go on with these sequences: a new stream introduces them again.
            self._executor.submit(self._worker.reset)
            log.info("scheduler unbound", lease=session.lease)

    def _start_over(self) -> tuple[tuple[bytes, bytes], list[str]]:
        """Sealed blocks and their hashes, and the adapters that plans have loaded."""
        self._worker.reset()
        return self._worker.sealed.list(), self._worker.adapters.loaded


async def _read_open(requests: Any) -> Open:
    try:
        async with asyncio.timeout(_OPEN_S):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        raise Unavailable("NO_OPEN", f"no `open` came within {_OPEN_S:.0f} s") from None
    if first is None or first.WhichOneof("message") != "open":
        raise InvalidRequest("NO_OPEN", "the first message of a stream must be `open`")
    opening: Open = first.open
    return opening
