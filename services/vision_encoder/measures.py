"""What a vision encoder counts for its metrics."""

from collections.abc import Callable, Iterator, Mapping

from shared.environment import monotonic
from shared.telemetry.series import WORK_S, Distribution, Measured, Series

_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
_PATCHES = (64, 256, 576, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

QUEUE = Series(
    "tessera_encoder_queue_items", "gauge", "Items that wait for the tower.", unit="items"
)
QUEUE_AGE = Series(
    "tessera_encoder_queue_age_seconds",
    "gauge",
    "For how long the oldest of them has waited; 0 where none waits.",
    unit="seconds",
)
WAIT = Series(
    "tessera_encoder_wait_seconds",
    "histogram",
    "From when an item's pixels are there until the tower takes it.",
    unit="seconds",
)
BATCH_ITEMS = Series(
    "tessera_encoder_batch_items", "histogram", "Items that the tower took at once.", unit="items"
)
BATCH_PATCHES = Series(
    "tessera_encoder_batch_patches",
    "histogram",
    "Patches that the tower took at once.",
    unit="patches",
)
COMPUTE = Series(
    "tessera_encoder_compute_seconds", "histogram", "The tower's time for a batch.", unit="seconds"
)
ROWS = Series(
    "tessera_encoder_rows", "counter", "Rows of embeddings that the tower made.", unit="rows"
)
FAILED = Series(
    "tessera_encoder_failed_items",
    "counter",
    "Items that the tower could not encode.",
    unit="items",
)
QUERIES = Series(
    "tessera_encoder_cache_queries",
    "counter",
    "Items whose embeddings were asked for.",
    unit="items",
)
HITS = Series(
    "tessera_encoder_cache_hits",
    "counter",
    "Of these, those whose embeddings were at hand, or being made for another request.",
    unit="items",
)
REFUSED = Series(
    "tessera_encoder_cache_refusals",
    "counter",
    "Items that found the cache full of embeddings that requests wait for; they come again.",
    unit="items",
)
CACHE_BYTES = Series(
    "tessera_encoder_cache_bytes",
    "gauge",
    "Embeddings that are kept (--encoder-cache-bytes), and places of those being made.",
    unit="bytes",
)
DEVICE_MEMORY = Series(
    "tessera_encoder_device_memory_bytes",
    "gauge",
    "Memory of the device that the tower runs on: allocated (by this process's tensors), reserved (held for them by"
    " torch), used (by all processes), total; of a CPU resident (this process) and total.",
    ("device", "kind"),
    unit="bytes",
)
SERIES = (
    *(QUEUE, QUEUE_AGE, WAIT, BATCH_ITEMS, BATCH_PATCHES, COMPUTE, ROWS, FAILED),
    *(QUERIES, HITS, REFUSED, CACHE_BYTES, DEVICE_MEMORY),
)


class EncoderMeasures:
    """Counted and read on the event loop."""

    def __init__(self) -> None:
        self.queries = self.hits = self.refused = 0
        # What is asked for when the page is: items that wait and when the oldest came, the cache's bytes,
        # the device's by what they are.
        self.waiting: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self.cache_bytes: Callable[[], int] = lambda: 0
        self.device = ""
        self.device_memory: Callable[[], Mapping[str, int]] = dict
        self._wait = Distribution(WORK_S)
        self._compute = Distribution(WORK_S)
        self._items = Distribution(_ITEMS)
        self._patches = Distribution(_PATCHES)
        self._rows = self._failed = self._taken = self._running = 0

    def taken(self, waited_s: list[float], patches: int) -> None:
        """The tower takes a batch; each of its items has waited so long."""
        for seconds in waited_s:
            self._wait.add(seconds)
        self._taken += len(waited_s)
        self._running = len(waited_s)
        self._items.add(len(waited_s))
        self._patches.add(patches)

    def computed(self, seconds: float, rows: int, failed: int) -> None:
        """A batch took so long, and gave so many rows."""
        self._running = 0
        self._compute.add(seconds)
        self._rows += rows
        self._failed += failed

    def load(self) -> dict[str, int | float]:
        """What it does at the moment, and sums since its start from which a reader who comes again makes means."""
        count, since = self.waiting()
        return {
            "running": self._running,
            "waiting": count,
            "oldest_us": round(1e6 * max(0.0, monotonic() - since)) if count else 0,
            "items": self._taken,
            "batches": sum(self._items.counts),
            "wait_us": round(1e6 * self._wait.total),
            "compute_us": round(1e6 * self._compute.total),
            "rows": self._rows,
            "failures": self._failed,
            "cache_queries": self.queries,
            "cache_hits": self.hits,
            "cache_refusals": self.refused,
            "cache_bytes": self.cache_bytes(),
        }

    def read(self) -> Iterator[Measured]:
        """All series."""
        count, since = self.waiting()
        yield QUEUE.of(count)
        yield QUEUE_AGE.of(max(0.0, monotonic() - since) if count else 0.0)
        yield WAIT.of(self._wait)
        yield BATCH_ITEMS.of(self._items)
        yield BATCH_PATCHES.of(self._patches)
        yield COMPUTE.of(self._compute)
        yield ROWS.of(self._rows)
        yield FAILED.of(self._failed)
        yield QUERIES.of(self.queries)
        yield HITS.of(self.hits)
        yield REFUSED.of(self.refused)
        yield CACHE_BYTES.of(self.cache_bytes())
        sizes = self.device_memory()
        yield DEVICE_MEMORY.by(((self.device, kind), size) for kind, size in sizes.items())
