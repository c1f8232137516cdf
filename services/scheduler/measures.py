"""What a scheduler shows in its metrics. Nothing is counted for them in the step path: they are read from its state."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from services.scheduler.decoders.link import DecoderLink, LinkEnd
from services.scheduler.encoders import Encoders
from services.scheduler.requests.output_tracker import OutputTracker
from shared.telemetry.series import Distribution, Measured, Series
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

REQUESTS = Series("tessera_scheduler_requests", "gauge", "Requests that this scheduler owns.")
TAKEN = Series("tessera_scheduler_taken_requests", "counter", "Requests taken from the queue.")
DECODERS = Series("tessera_scheduler_decoders", "gauge", "Decoders that this scheduler has bound.")
LOST = Series(
    "tessera_scheduler_lost_decoders",
    "counter",
    "Decoders lost: broken (the process or its connection ended), step_failed (it failed a whole step).",
    ("how",),
)
ENCODES = Series(
    "tessera_scheduler_encodes_in_flight",
    "gauge",
    "Media items that are being encoded, or wait for a vision encoder.",
    unit="items",
)
FAILED_ENCODES = Series(
    "tessera_scheduler_failed_encodes",
    "counter",
    "Calls of vision encoders that failed; the next encoder is tried, or the same one again.",
)
SEQUENCES = Series(
    "tessera_scheduler_sequences",
    "gauge",
    "Sequences by state: running, waiting (for room), waiting_for_media.",
    ("decoder", "state"),
)
KV_BLOCKS = Series(
    "tessera_scheduler_kv_blocks",
    "gauge",
    "Blocks of the KV cache: used (what is only cached is not counted), total.",
    ("decoder", "state"),
    unit="blocks",
)
HOST_BLOCKS = Series(
    "tessera_scheduler_host_kv_blocks",
    "gauge",
    "Blocks in host memory for sequences that are swapped out: used, total.",
    ("decoder", "state"),
    unit="blocks",
)
PREFIX_QUERIES = Series(
    "tessera_scheduler_prefix_cache_queries",
    "counter",
    "Prompt tokens that were looked for in the prefix cache.",
    ("decoder",),
    unit="tokens",
)
PREFIX_HITS = Series(
    "tessera_scheduler_prefix_cache_hits",
    "counter",
    "Of these, those that were found.",
    ("decoder",),
    unit="tokens",
)
PREEMPTIONS = Series(
    "tessera_scheduler_preemptions",
    "counter",
    "Sequences that gave up their blocks: recompute (computed again), swap (saved in host memory).",
    ("decoder", "mode"),
)
STEP_TOKENS = Series(
    "tessera_scheduler_step_planned_tokens",
    "histogram",
    "Tokens planned for a step.",
    ("decoder",),
    unit="tokens",
)
STEP_PARTS = Series(
    "tessera_scheduler_step_part_seconds",
    "counter",
    "Where the time of steps went: plan and log here; transfer both ways; queue, prepare, forward and sample at the"
    " decoder; step is what clients wait for.",
    ("decoder", "part"),
    unit="seconds",
)
STEPS = Series(
    "tessera_scheduler_steps", "counter", "Steps with rows that were answered.", ("decoder",)
)
SERIES = (
    *(REQUESTS, TAKEN, DECODERS, LOST, ENCODES, FAILED_ENCODES, SEQUENCES, KV_BLOCKS, HOST_BLOCKS),
    *(PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS, STEP_TOKENS, STEP_PARTS, STEPS),
)

_PARTS = ("plan", "log", "transfer", "queue", "prepare", "forward", "sample", "step")
_HOW = {LinkEnd.BROKEN: "broken", LinkEnd.STEP_FAILED: "step_failed"}


class SchedulerMeasures:
    """Reads a scheduler's state on its event loop."""

    def __init__(
        self,
        links: Mapping[str, DecoderLink],
        tracker: OutputTracker,
        encoders: Encoders,
    ) -> None:
        """`links`: those that are bound, which come and go."""
        self.taken = 0
        self._lost: Counter[LinkEnd] = Counter()
        self._links, self._tracker, self._encoders = links, tracker, encoders

    def lost(self, link: DecoderLink) -> None:
        """A link that was bound has ended."""
        self._lost[link.ended] += 1

    def read(self) -> Iterator[Measured]:
        """All series."""
        links = list(self._links.values())
        yield REQUESTS.of(self._tracker.num_requests)
        yield TAKEN.of(self.taken)
        yield DECODERS.of(len(links))
        yield LOST.by(((name,), self._lost[end]) for end, name in _HOW.items())
        yield ENCODES.of(self._encoders.num_running)
        yield FAILED_ENCODES.of(self._encoders.num_failed)
        yield from _of_decoders({decoder_name(link.member.address): link for link in links})


def _of_decoders(links: Mapping[str, DecoderLink]) -> Iterator[Measured]:
    loads = {name: link.load() for name, link in links.items()}
    states = {name: _sequences(load) for name, load in loads.items()}
    yield SEQUENCES.by(((n, state), c) for n, by in states.items() for state, c in by.items())
    blocks = {name: (load.blocks_used, load.blocks_total) for name, load in loads.items()}
    yield _used_and_total(KV_BLOCKS, blocks)
    hosts = {name: link.core.state.swapping.host for name, link in links.items()}
    yield _used_and_total(
        HOST_BLOCKS,
        {name: (host.num_total - host.num_free, host.num_total) for name, host in hosts.items()},
    )
    yield PREFIX_QUERIES.by(((n,), d.prefix_queries * d.block_size) for n, d in loads.items())
    yield PREFIX_HITS.by(((n,), d.prefix_hits * d.block_size) for n, d in loads.items())
    swaps = {name: link.core.state.swaps for name, link in links.items()}
    yield PREEMPTIONS.by(
        ((name, mode), count)
        for name, load in loads.items()
        for mode, count in (("recompute", load.preemptions - swaps[name]), ("swap", swaps[name]))
    )
    yield STEP_TOKENS.by(
        ((n,), Distribution.of(d.step_tokens.bounds, d.step_tokens.counts, d.step_tokens.total))
        for n, d in loads.items()
    )
    yield STEP_PARTS.by(
        ((name, part), getattr(load.totals, f"{part}_us") / 1e6)
        for name, load in loads.items()
        for part in _PARTS
    )
    yield STEPS.by(((name,), load.totals.steps) for name, load in loads.items())


def _sequences(load: DecoderLoad) -> dict[str, int]:
    media = load.waiting_for_media
    return {
        "running": load.running,
        "waiting": load.waiting - media,
        "waiting_for_media": media,
    }


def _used_and_total(series: Series, blocks: Mapping[str, Collection[int]]) -> Measured:
    return series.by(
        ((name, state), count)
        for name, both in blocks.items()
        for state, count in zip(("used", "total"), both, strict=True)
    )


def decoder_name(address: str) -> str:
    """What a decoder is called in labels: its address, or the name of its socket. It keeps that when it is started
    again at the same place."""
    if not address.startswith("unix:"):
        return address
    return address.rpartition("/")[2].removesuffix(".sock")
