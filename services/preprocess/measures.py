"""What preprocess counts for its metrics."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shared.errors import ServingError
from shared.telemetry.series import WORK_S, Distribution, Measured, Series

_BYTES = (1e3, 1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8)
_PIXELS = (1e3, 1e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8)
_TOKENS = (10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)

PROMPTS = Series(
    "tessera_preprocess_prompts",
    "counter",
    "Prompts that were prepared, by whether they had media.",
    ("media",),
)
FAILED = Series(
    "tessera_preprocess_failures", "counter", "Prompts that were refused, by reason.", ("reason",)
)
IN_PROGRESS = Series(
    "tessera_preprocess_prompts_in_progress", "gauge", "Prompts that are being prepared."
)
STEPS = Series(
    "tessera_preprocess_step_seconds",
    "histogram",
    "Time of each step: tokenize (chat template and tokenizer, of a prompt), fetch (getting an item's bytes),"
    " media (decoding it and making its pixel values, with the wait for a worker; short where these are cached).",
    ("step",),
    unit="seconds",
)
PROMPT_TOKENS = Series(
    "tessera_preprocess_prompt_tokens",
    "histogram",
    "Tokens of a prompt with its placeholders.",
    unit="tokens",
)
MEDIA_BYTES = Series(
    "tessera_preprocess_media_bytes",
    "histogram",
    "Size of a media item's file, or of a video's frames together.",
    ("modality",),
    unit="bytes",
)
MEDIA_PIXELS = Series(
    "tessera_preprocess_media_pixels",
    "histogram",
    "Width times height of a picture or of a video's frame as the model is shown it.",
    ("modality",),
    unit="pixels",
)
QUERIES = Series(
    "tessera_preprocess_cache_queries",
    "counter",
    "Media items whose pixel values were looked for in the cache.",
    unit="items",
)
HITS = Series(
    "tessera_preprocess_cache_hits", "counter", "Of these, those that were found.", unit="items"
)
CACHE_BYTES = Series(
    "tessera_preprocess_cache_bytes",
    "gauge",
    "Pixel values that are kept (--pixel-cache-bytes).",
    unit="bytes",
)
WAITING = Series(
    "tessera_preprocess_queue_items",
    "gauge",
    "Media items that wait for a worker process.",
    unit="items",
)
BUSY = Series(
    "tessera_preprocess_busy_workers", "gauge", "Worker processes that decode a media item."
)
LOST = Series(
    "tessera_preprocess_lost_workers",
    "counter",
    "Worker processes that died or hung over a media item.",
)
SERIES = (
    *(PROMPTS, FAILED, IN_PROGRESS, STEPS, PROMPT_TOKENS, MEDIA_BYTES, MEDIA_PIXELS),
    *(QUERIES, HITS, CACHE_BYTES, WAITING, BUSY, LOST),
)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Media items that wait for a worker and that have one, and workers lost so far."""

    waiting: int = 0
    busy: int = 0
    lost: int = 0


class PreprocessMeasures:
    """Counted and read on the event loop."""

    def __init__(self) -> None:
        # What is asked for when the page is.
        self.workers: Callable[[], WorkerLoad] = WorkerLoad
        self.cache_bytes: Callable[[], int] = lambda: 0
        self._prompts = [0, 0]  # without media, with
        self._failed: Counter[str] = Counter()
        self._in_progress = 0
        self._steps = {step: Distribution(WORK_S) for step in ("tokenize", "fetch", "media")}
        self._tokens = Distribution(_TOKENS)
        self._bytes: dict[str, Distribution] = {}
        self._pixels: dict[str, Distribution] = {}
        self._queries = self._hits = 0

    @contextlib.contextmanager
    def preparing(self, prompts: int = 1) -> Iterator[None]:
        """So many prompts are being prepared until the block ends; what it raises is counted."""
        self._in_progress += prompts
        try:
            yield
        except ServingError as error:
            self.failed(error.reason)
            raise
        finally:
            self._in_progress -= prompts

    def prepared(self, tokens: int, tokenize_us: int, *, has_media: bool) -> None:
        """A prompt is ready."""
        self._prompts[has_media] += 1
        self._tokens.add(tokens)
        self._steps["tokenize"].add(tokenize_us / 1e6)

    def failed(self, reason: str) -> None:
        """A prompt was refused."""
        self._failed[reason.lower()] += 1

    def taken(self, modality: str, size: int, pixels: int, *, cached: bool) -> None:
        """An item of so many bytes has pixel values; `pixels`: width times height."""
        self._bytes.setdefault(modality, Distribution(_BYTES)).add(size)
        self._pixels.setdefault(modality, Distribution(_PIXELS)).add(pixels)
        self._queries += 1
        self._hits += cached

    def item_times(self, fetch_us: int, media_us: int) -> None:
        """How long an item took."""
        self._steps["fetch"].add(fetch_us / 1e6)
        self._steps["media"].add(media_us / 1e6)

    def load(self) -> dict[str, int | float]:
        """What it does at the moment, and sums since its start from which a reader who comes again makes means."""
        workers = self.workers()
        return {
            "running": self._in_progress,
            "waiting_items": workers.waiting,
            "busy_workers": workers.busy,
            "lost_workers": workers.lost,
            "prompts": sum(self._prompts),
            "failures": self._failed.total(),
            **{f"{step}_us": round(1e6 * times.total) for step, times in self._steps.items()},
            "cache_queries": self._queries,
            "cache_hits": self._hits,
            "cache_bytes": self.cache_bytes(),
        }

    def read(self) -> Iterator[Measured]:
        """All series."""
        yield PROMPTS.by(
            (((name,), n) for name, n in zip(("no", "yes"), self._prompts, strict=True))
        )
        yield FAILED.by(((reason,), count) for reason, count in self._failed.items())
        yield IN_PROGRESS.of(self._in_progress)
        yield STEPS.by(((step,), times) for step, times in self._steps.items())
        yield PROMPT_TOKENS.of(self._tokens)
        yield MEDIA_BYTES.by(((kind,), sizes) for kind, sizes in self._bytes.items())
        yield MEDIA_PIXELS.by(((kind,), sizes) for kind, sizes in self._pixels.items())
        yield QUERIES.of(self._queries)
        yield HITS.of(self._hits)
        yield CACHE_BYTES.of(self.cache_bytes())
        workers = self.workers()
        yield WAITING.of(workers.waiting)
        yield BUSY.of(workers.busy)
        yield LOST.of(workers.lost)
