"""The queue before the tower: what waits when the tower becomes free runs together."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import torch

from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.measures import EncoderMeasures
from services.vision_encoder.towers.encoder import Encoder, Item, to_array
from shared.artifacts import file as artifact_file
from shared.artifacts.space import out_of_space
from shared.artifacts.store import Reservation
from shared.environment import monotonic
from shared.errors import Precondition
from shared.net.supervise import Background

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Encoded:
    """The result of one item: the rows written under its reservation, and the tower's time for the batch."""

    rows: int
    encode_us: int
    queue_us: int = 0  # from its arrival to that
    items: int = 1  # of the batch


@dataclass
class _Job:
    item: Item
    patches: int
    place: Reservation
    done: asyncio.Future[Encoded]
    since: float  # when it came


class TowerQueue:
    """Runs the tower on a thread of its own, one batch at a time, in order of arrival.

    No timer: a single image never waits for a batch. Batches hold at most `max_patches`, but always
    one item.
    """

    def __init__(
        self,
        model: Encoder,
        device: Device,
        max_patches: int,
        measures: EncoderMeasures | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self.max_patches = max_patches
        self._waiting: deque[_Job] = deque()
        self._measures = measures or EncoderMeasures()
        self._measures.waiting = self._look
        self._thread = ThreadPoolExecutor(1, "tower")
        self._runner: Background | None = None

    async def encode(self, item: Item, place: Reservation) -> Encoded:
        """Writes the embedding rows of one item under `place`. Raises BadPixels, Overloaded, and
        Precondition for an item that by itself does not fit into the device's memory."""
        patches = self._model.cost(item)
        done: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(item, patches, place, done, monotonic()))
        if self._runner is None:
            # It works for all requests: its log lines must not carry the names of the one that starts it.
            self._runner = contextvars.Context().run(Background, "tower", self._run)
        return await done

    async def on_thread(self, work: Callable[[], None]) -> None:
        """Runs something else on the tower's thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Ends the thread after the batch that is running."""
        self._thread.shutdown(cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            began = monotonic()
            self._measures.taken(
                [began - job.since for job in batch], sum(j.patches for j in batch)
            )
            try:
                results = await loop.run_in_executor(self._thread, self._compute, batch)
            except Exception as error:  # raised in every caller of the batch
                results = [error] * len(batch)
            made = [result.rows for result in results if isinstance(result, Encoded)]
            self._measures.computed(monotonic() - began, sum(made), len(batch) - len(made))
            for job, result in zip(batch, results, strict=True):
                if job.done.done():
                    continue
                if isinstance(result, Exception):
                    job.done.set_exception(result)
                else:
                    job.done.set_result(result)
        self._runner = None

    def _look(self) -> tuple[int, float]:
        return len(self._waiting), self._waiting[0].since if self._waiting else 0.0

    def _next_batch(self) -> list[_Job]:
        batch: list[_Job] = []
        patches = 0
        while self._waiting and (not batch or self._fits(batch[0], patches)):
            job = self._waiting.popleft()
            patches += job.patches
            batch.append(job)
        return batch

    def _fits(self, first: _Job, patches: int) -> bool:
        following = self._waiting[0]
        together = not self._model.stacked or _alike(following.item, first.item)
        return together and patches + following.patches <= self.max_patches

    def _compute(self, batch: list[_Job]) -> list[Encoded | Exception]:
        began = monotonic()
        embeddings = self._encode([job.item for job in batch])
        encode_us = int((monotonic() - began) * 1e6)
        results: list[Encoded | Exception] = []
        for job, embedding in zip(batch, embeddings, strict=True):
            if isinstance(embedding, Precondition):
                results.append(embedding)
                continue
            array, dtype = to_array(embedding)
            place = job.place
            try:
                artifact_file.fill(place.path, place.nonce, place.digest, array, dtype)
                queue_us = int((began - job.since) * 1e6)
                results.append(Encoded(array.shape[0], encode_us, queue_us, len(batch)))
            except OSError as error:
                results.append(out_of_space(error, place.path))
        return results

    def _encode(self, items: list[Item]) -> list[torch.Tensor | Precondition]:
        """Rows of each item. Where memory does not suffice once more with what the device holds unused, then one item
        at a time: only one that does not fit by itself has an error in place of rows."""
        for _ in range(2):
            try:
                return list(self._model.encode(items))
            except torch.OutOfMemoryError as error:
                log.warning("the tower is out of memory", items=len(items), error=str(error))
            self._device.free_unused()
        if len(items) == 1:
            return [_out_of_memory(self._model.cost(items[0]))]
        return [rows for item in items for rows in self._encode([item])]


def _alike(one: Item, other: Item) -> bool:
    """Whether two items can be stacked."""
    return one.modality == other.modality and one.pixels.shape == other.pixels.shape


def _out_of_memory(patches: int) -> Precondition:
    return Precondition(
        "OUT_OF_MEMORY",
        f"an item of {patches} patches does not fit into the encoder's memory: send a smaller one, or give the encoder"
        " more (--encoder-memory-utilization)",
    )
