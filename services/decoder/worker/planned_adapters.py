"""Adapters that plans load and unload. They are read beside the steps, and no step waits for one."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import structlog

from services.decoder.worker.plans.plan import Plan
from shared.errors import Internal, Precondition, ServingError
from tessera.decoder.v1.decoder_pb2 import AdapterOutcome, LoadAdapter

log = structlog.get_logger(__name__)

# Adds what was read to the model, between two steps.
Add: TypeAlias = Callable[[], None]
# Reads an adapter, by its digest and its folder, on any thread. Raises ServingError.
ReadAdapter: TypeAlias = Callable[[str, str], Add]


class PlannedAdapters:
    """`begin`, `report` and `listen` are called on the event loop, the rest on the compute thread.

    Of several ranks each reads its own share, in the order of the plans. The first one alone reports: where another one
    is still reading when a sequence comes, that one waits.
    """

    def __init__(
        self,
        drop: Callable[[str], None],
        read: ReadAdapter | None = None,
        places: int = 0,
        bind_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """drop: see `DecoderModel.drop_adapter`; read: None where nothing is loaded; places: how many adapters the
        scheduler may have here at a time; bind_thread: see `Device.bind_thread`."""
        self.places = places
        self._drop = drop
        self._read_one = read
        # Its thread starts when it is needed.
        self._pool = ThreadPoolExecutor(1, "adapters", bind_thread)
        self._reading: dict[str, Future[Add]] = {}  # of applied plans
        self._here: dict[str, None] = {}
        self._outcomes: deque[AdapterOutcome] = deque()
        self._on_news: Callable[[], None] = lambda: None

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls `on_news`, on any thread, when there is something to report, in place of who listened before."""
        self._on_news = on_news

    def begin(self, message: LoadAdapter) -> "Future[Add]":
        """Begins to read an adapter of a plan that will be applied."""
        reading = self._pool.submit(self._read, message.lora_id, message.folder)
        reading.add_done_callback(partial(self._note, message.lora_id))
        return reading

    def apply(self, plan: Plan) -> None:
        """Takes over what a plan loads and unloads."""
        for lora_id in plan.unload_adapters:
            self._reading.pop(lora_id, None)
            if lora_id in self._here:
                del self._here[lora_id]
                self._drop(lora_id)
                log.info("unloaded adapter", lora_id=lora_id)
        for message, reading in zip(plan.load_adapters, plan.reading, strict=True):
            self._reading[message.lora_id] = reading

    def finish(self, lora_id: str) -> None:
        """Adds an adapter to the model that is read, or still being read, for a sequence that has it. Raises
        ServingError where it could not be read."""
        reading = self._reading.pop(lora_id, None)
        if reading is not None:
            reading.result()()
            self._here[lora_id] = None

    @property
    def loaded(self) -> list[str]:
        """Digests of those that plans have loaded, once nothing is being read."""
        return list(self._here)

    def settle(self) -> None:
        """Waits until nothing is being read."""
        for lora_id in list(self._reading):
            try:
                self.finish(lora_id)
            except ServingError as error:
                log.warning("an adapter was not read", lora_id=lora_id, error=error.message)
        self._outcomes.clear()

    def report(self) -> list[AdapterOutcome]:
        """What became of adapters since the last report."""
        found = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        return found

    def _read(self, lora_id: str, folder: str) -> Add:
        if self._read_one is None:
            raise Precondition(
                "ADAPTERS_NOT_ALLOWED",
                "this decoder loads no adapters while it runs: start it with --allowed-adapter-dir",
            )
        try:
            return self._read_one(lora_id, folder)
        except ServingError:
            raise
        except Exception as error:
            log.exception("an adapter was not read", lora_id=lora_id)
            raise Internal("ADAPTER_NOT_READ", f"{folder}: {error}") from error

    def _note(self, lora_id: str, reading: "Future[Add]") -> None:
        error = reading.exception()
        outcome = AdapterOutcome(lora_id=lora_id)
        if isinstance(error, ServingError):
            log.warning("an adapter was not read", lora_id=lora_id, error=error.message)
            outcome.failure.CopyFrom(error.to_failure())
        self._outcomes.append(outcome)
        self._on_news()
