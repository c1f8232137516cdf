"""A small pool of image worker processes, kept warm. A worker that dies or hangs is replaced and costs one image."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from services.preprocess.measures import WorkerLoad
from services.preprocess.media.image_limits import ImageLimits
from services.preprocess.media.made_item import MadeItem
from services.preprocess.media.processor_config import read_processor_config, read_video_size
from services.preprocess.worker.decode_quota import DecodeBudget, DecodeSlots
from services.preprocess.worker.process import WorkerDied, WorkerProcess
from shared.artifacts.pixel_scaling import PixelScaling
from shared.artifacts.space import out_of_space
from shared.artifacts.store import Reservation
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_name
from shared.errors import InvalidRequest, ServingError, Unavailable
from tessera.common.v1.media_pb2 import Modality

log = structlog.get_logger(__name__)

StartWorker = Callable[[Sequence[str]], Awaitable[WorkerProcess]]

_START_TIMEOUT_S = 60.0
_TRIES = 2
_STARVED_S = 0.1


@dataclass(frozen=True)
class ProcessorInfo:
    """A worker's processor: its settings with defaults, the shape of its output, and the scaling of pixels stored as
    uint8; None where they are stored as float32, or in bundles.
    """

    settings: dict[str, Any]
    shape: tuple[int, ...]
    scaling: PixelScaling | None


class ImageWorkerPool:
    """Decodes images and writes their pixel values, `size` at a time for one tenant, and one more where there are
    several. Enter it to start the workers.
    """

    def __init__(
        self,
        folder: Path,
        limits: ImageLimits,
        size: int,
        timeout_s: float,
        budget_s: float = 0.0,
        bundles: bool = False,
        family: str = "",
        *,
        starved_s: float = _STARVED_S,
        start: StartWorker = WorkerProcess.start,
    ) -> None:
        """`bundles`: by the checkpoint's whole processor, which also says the token ids of an item. A worker that got
        less than `starved_s` of processor time before its timeout was starved by the system: its file is tried again.
        """
        self.bundles = bundles
        checkpoint = Checkpoint(folder, family)
        maker = (
            {"folder": str(folder), "family": family} if bundles else _image_processor(checkpoint)
        )
        self._arguments = (json.dumps(maker), json.dumps(asdict(limits)))
        self._timeout_s = timeout_s
        self._starved_s = starved_s
        self._start_worker = start
        self._budget = DecodeBudget(budget_s)
        self._slots = DecodeSlots(size)
        self._idle: list[WorkerProcess] = []
        self._workers: set[WorkerProcess] = set()
        self._closed = False
        self._lost = 0
        self.info: ProcessorInfo

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.pid for worker in self._workers]

    @property
    def load(self) -> WorkerLoad:
        """What it is doing."""
        return WorkerLoad(self._slots.num_waiting, self._slots.num_busy, self._lost)

    async def __aenter__(self) -> Self:
        """Starts the first worker, which reports the processor's settings; the others start when needed."""
        worker = await self._start(first=True)
        self._idle.append(worker)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        workers, self._workers = self._workers, set()
        await asyncio.gather(*(worker.stop() for worker in workers))

    async def process(
        self, data: bytes, modality: Modality.ValueType, place: Reservation, tenant: str = ""
    ) -> MadeItem:
        """Writes the pixel values of an image file, or of a video as `frames` packs it, under the reservation.

        A file is tried again only where its worker was ended for another reason than the file. Raises
        InvalidRequest (without a field) when the file cannot be used, takes too long or kills its
        worker; TooLarge where shared memory could never hold the pixel values; Overloaded when it is full or the
        tenant's budget is spent.
        """
        self._budget.check(tenant)
        async with self._slots.slot(tenant):
            self._budget.check(tenant)  # may have been spent while it waited
            names = {"nonce": place.nonce.hex(), "digest": place.digest.hex()}
            job = {"modality": int(modality), **names}
            answer = await self._tried(job, data, place, tenant)
        if "errno" in answer:
            raise out_of_space(OSError(answer["errno"], answer["message"]), place.path)
        if "reason" in answer:
            raise InvalidRequest(answer["reason"], answer["message"])
        return MadeItem(**answer, modality=modality)

    async def _tried(
        self, job: dict[str, Any], data: bytes, place: Reservation, tenant: str
    ) -> dict[str, Any]:
        for attempt in range(_TRIES):
            try:
                return await self._run(job, data, place, tenant)
            except _JobFailed as failed:
                place.path.unlink(missing_ok=True)
                self._lost += 1
                log.warning("image worker lost", cause=failed.message, again=failed.again)
                if attempt + 1 == _TRIES or not failed.again:
                    raise InvalidRequest(failed.reason, failed.message) from failed
        raise AssertionError("the last attempt returns or raises")

    async def _run(
        self, job: dict[str, Any], data: bytes, place: Reservation, tenant: str
    ) -> dict[str, Any]:
        worker = await self._worker()
        began, before = time.monotonic(), worker.processor_s() or 0.0

        def spent() -> float:
            after = worker.processor_s()
            return time.monotonic() - began if after is None else after - before

        keep = used = False
        try:
            descriptor = place.create()
            try:
                answer = await self._made(worker, job, data, descriptor, place)
            finally:
                os.close(descriptor)
            keep, used = True, "reason" not in answer
            return answer
        except ServingError:  # no room for what it has made
            keep = used = True
            raise
        except TimeoutError as error:
            raise self._too_long(again=spent() < self._starved_s) from error
        except WorkerDied as error:
            if error.out_of_time:
                raise self._too_long(again=False) from error
            message = f"the file cannot be processed: its decoder died ({error})"
            raise _JobFailed("IMAGE_UNUSABLE", message, not error.by_the_file) from error
        finally:
            self._budget.charge(tenant, spent(), used)
            # Not kept when it died, hung, or was left in the middle of a job by a cancelled call.
            if keep:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
                await asyncio.shield(worker.stop())

    async def _made(
        self,
        worker: WorkerProcess,
        job: dict[str, Any],
        data: bytes,
        descriptor: int,
        place: Reservation,
    ) -> dict[str, Any]:
        async with asyncio.timeout(self._timeout_s):
            answer = await worker.ask(job, data, descriptor, self._timeout_s)
        if "needs" not in answer:
            return answer
        try:  # no part of the time for decoding
            await place.space.allocate(descriptor, int(answer["needs"]), place.path)
        except ServingError:
            await worker.forget()
            raise
        async with asyncio.timeout(self._timeout_s):
            return await worker.write()

    async def _worker(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended():
                return worker
            self._workers.discard(worker)
            await worker.stop()
        return await self._start()

    def _too_long(self, again: bool) -> "_JobFailed":
        message = f"the file cannot be processed: decoding it took over {self._timeout_s:g} s"
        return _JobFailed("IMAGE_TIMEOUT", f"{message} (--image-timeout-s)", again)

    async def _start(self, first: bool = False) -> WorkerProcess:
        if self._closed:
            raise Unavailable("SHUTTING_DOWN", "this preprocess is stopping; retry elsewhere")
        worker = await self._start_worker(self._arguments)
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                hello = await worker.receive()
        except (WorkerDied, TimeoutError) as error:
            self._workers.discard(worker)
            await worker.stop()
            raise Unavailable(
                "IMAGE_WORKER", "the image worker does not start; its own message stands above"
            ) from error
        if "refused" in hello:
            self._workers.discard(worker)
            await worker.stop()
            raise InvalidRequest(hello["refused"], hello["message"], field="model")
        scaling = None if hello["scaling"] is None else _scaling(**hello["scaling"])
        if first:
            _log_confinement(hello["confinement"])
        self.info = ProcessorInfo(hello["settings"], tuple(hello["shape"]), scaling)
        return worker


class _JobFailed(Exception):
    """A job lost its worker; `again`: for another reason than its file."""

    def __init__(self, reason: str, message: str, again: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.again = again


def _image_processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options of a `PixelMaker`."""
    config = read_processor_config(checkpoint.folder, checkpoint.family)
    name = image_processor_name(config)
    return {"name": name, "config": config, "video_size": read_video_size(checkpoint.folder)}


def _log_confinement(confinement: dict[str, list[str]]) -> None:
    """Logs once which layers of confinement are in force."""
    if confinement["missing"]:
        log.warning("image workers are not fully confined", **confinement)
    else:
        log.info("image workers are confined", by=", ".join(confinement["layers"]))


def _scaling(factor: float, mean: Sequence[float], deviation: Sequence[float]) -> PixelScaling:
    return PixelScaling(factor, tuple(mean), tuple(deviation))
