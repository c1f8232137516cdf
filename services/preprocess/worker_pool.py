"""A small pool of image worker processes, kept warm. A worker that dies or hangs is replaced and costs one image."""

import asyncio
import contextlib
import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from services.preprocess.image_limits import ImageLimits
from services.preprocess.processor_config import (
    processor_class_name,
    read_processor_config,
    read_video_size,
)
from shared.artifacts import Reservation, out_of_space
from shared.errors import InvalidRequest, Unavailable
from shared.pixel_scaling import PixelScaling
from shared.settings import child_environment

log = structlog.get_logger(__name__)

_LENGTH = struct.Struct("<I")
_START_TIMEOUT_S = 60.0
_TRIES = 2


@dataclass(frozen=True)
class ProcessorInfo:
    """What a worker says of its image processor: settings after defaults, the shape of its output,
    and what makes values of its bytes; None where it writes the values themselves."""

    settings: dict[str, Any]
    shape: tuple[int, ...]
    scaling: PixelScaling | None


@dataclass(frozen=True)
class PictureSize:
    """Width and height of the upright picture, in pixels; of a video also how many frames of it are
    shown, and their pace: 0 where its file does not say.
    """

    width: int
    height: int
    frames: int = 0
    seconds_per_frame: float = 0.0


class _WorkerDied(Exception):
    pass


class _Worker:
    """One child process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.preprocess.image_worker",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # One picture at a time on one core; a pool of threads inside would only get in others'
            # way.
            env=child_environment(
                TRANSFORMERS_VERBOSITY="error",
                OMP_NUM_THREADS="1",
                OPENBLAS_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
            ),
            start_new_session=True,  # a terminal's Ctrl-C is the room's to handle
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
            answer: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _WorkerDied from error
        return answer

    async def ask(self, job: dict[str, Any], data: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        text = json.dumps({**job, "bytes": len(data)}).encode()
        try:
            self._process.stdin.write(_LENGTH.pack(len(text)) + text)
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise _WorkerDied from error
        return await self.receive()

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class ImageWorkerPool:
    """Decodes images and writes their pixel values, `size` at a time. Enter it to start the workers."""

    def __init__(self, folder: Path, limits: ImageLimits, size: int, timeout_s: float) -> None:
        config = read_processor_config(folder)
        self._arguments = (
            processor_class_name(config),
            json.dumps(config),
            json.dumps(asdict(limits)),
            json.dumps(read_video_size(folder)),
        )
        self._size = size
        self._timeout_s = timeout_s
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self._closed = False
        self.info: ProcessorInfo

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.pid for worker in self._workers]

    async def __aenter__(self) -> Self:
        """Starts the first worker and learns from it what the processor does; the others start when needed."""
        worker = await self._start()
        self._idle.put_nowait(worker)
        for _ in range(self._size - 1):
            self._idle.put_nowait(None)
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

    async def process(self, data: bytes, place: Reservation) -> PictureSize:
        """Writes the pixel values of an image file, or of a video of `frames`, under the reservation.

        Raises InvalidRequest (without a field) when the file cannot be used, or kills workers;
        Overloaded when shared memory is full.
        """
        job = {
            "path": str(place.path),
            "nonce": place.nonce.hex(),
            "digest": place.digest.hex(),
        }
        for attempt in range(_TRIES):
            try:
                answer = await self._run(job, data)
                break
            except (_WorkerDied, TimeoutError) as error:
                place.path.unlink(missing_ok=True)
                cause = "took too long" if isinstance(error, TimeoutError) else "died"
                log.warning("image worker lost", cause=cause, attempt=attempt + 1)
        else:
            raise InvalidRequest(
                "IMAGE_UNUSABLE", f"the file cannot be processed: its decoder {cause}"
            )
        if "errno" in answer:
            raise out_of_space(OSError(answer["errno"], answer["message"]), place.path)
        if "reason" in answer:
            raise InvalidRequest(answer["reason"], answer["message"])
        return PictureSize(**answer)

    async def _run(self, job: dict[str, Any], data: bytes) -> dict[str, Any]:
        worker = await self._idle.get()
        keep: _Worker | None = None
        try:
            worker = worker or await self._start()
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(job, data)
            keep = worker
            return answer
        finally:
            # Not kept when it died, hung, or was left in the middle of a job by a cancelled call.
            if keep is None and worker is not None:
                self._workers.discard(worker)
                await asyncio.shield(worker.stop())
            self._idle.put_nowait(keep)

    async def _start(self) -> _Worker:
        if self._closed:
            raise Unavailable("SHUTTING_DOWN", "this preprocess is stopping; retry elsewhere")
        worker = await _Worker.start(self._arguments)
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                hello = await worker.receive()
        except (_WorkerDied, TimeoutError) as error:
            self._workers.discard(worker)
            await worker.stop()
            raise Unavailable(
                "IMAGE_WORKER", "the image worker does not start; its own message stands above"
            ) from error
        scaling = None if hello["scaling"] is None else _scaling(**hello["scaling"])
        self.info = ProcessorInfo(hello["settings"], tuple(hello["shape"]), scaling)
        return worker


def _scaling(factor: float, mean: Sequence[float], deviation: Sequence[float]) -> PixelScaling:
    return PixelScaling(factor, tuple(mean), tuple(deviation))
