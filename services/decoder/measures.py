"""What a decoder counts for its metrics: sums over steps, made where their results leave, behind them."""

from collections.abc import Iterator
from dataclasses import fields

from torch import Tensor

from services.decoder.worker.plans.plan import Plan
from services.decoder.worker.worker import Worker
from shared.environment import monotonic
from shared.telemetry.series import WORK_S, Distribution, Measured, Series
from tessera.decoder.v1.decoder_pb2 import StepResult

STEP = Series(
    "tessera_decoder_step_duration_seconds",
    "histogram",
    "A step, from when its plan is applied until its result leaves.",
    unit="seconds",
)
PARTS = Series(
    "tessera_decoder_step_part_seconds",
    "counter",
    "Where steps spent their time: prepare (applying the plan), forward (the model), sample (choosing tokens); queue is"
    " what plans that came ahead waited beside that.",
    ("part",),
    unit="seconds",
)
IDLE = Series(
    "tessera_decoder_idle_seconds",
    "counter",
    "Time since the decoder was ready in which no step ran.",
    unit="seconds",
)
COMPUTED = Series(
    "tessera_decoder_computed_tokens",
    "counter",
    "Tokens that steps computed: of prompts, and those that were generated before.",
    unit="tokens",
)
SAMPLED = Series(
    "tessera_decoder_sampled_tokens", "counter", "Tokens that steps chose.", unit="tokens"
)
FAILED_ROWS = Series(
    "tessera_decoder_failed_rows", "counter", "Sequences that failed in a step, such as by NaN."
)
FAILED_STEPS = Series(
    "tessera_decoder_failed_steps", "counter", "Steps that failed as a whole, and ended the stream."
)
BINDINGS = Series(
    "tessera_decoder_bindings", "counter", "How often a scheduler has bound this decoder."
)
BOUND = Series(
    "tessera_decoder_bound", "gauge", "Whether a scheduler has bound this decoder: 1, or 0."
)
SEQUENCES = Series(
    "tessera_decoder_sequences", "gauge", "Sequences that the decoder has slots for."
)
MEMORY = Series(
    "tessera_decoder_memory_bytes",
    "gauge",
    "What the decoder has set aside: kv_cache and host_kv_cache (for swapping) whatever is in use of them, and"
    " embeddings of media that it has.",
    ("kind",),
    unit="bytes",
)
DEVICE_MEMORY = Series(
    "tessera_decoder_device_memory_bytes",
    "gauge",
    "Memory of the device that the decoder computes on: allocated (by this process's tensors), reserved (held for them"
    " by torch), used (by all processes), total; of a CPU resident (this process) and total.",
    ("device", "kind"),
    unit="bytes",
)
SERIES = (
    *(STEP, PARTS, IDLE, COMPUTED, SAMPLED, FAILED_ROWS, FAILED_STEPS),
    *(BINDINGS, BOUND, SEQUENCES, MEMORY, DEVICE_MEMORY),
)

_TOKEN_BYTES = 4
# In the place of a token behind a draft that was wrong, or of a row that failed. Ids are smaller than 2**24, so that no
# other bytes look like it.
_NO_TOKEN = (-1).to_bytes(_TOKEN_BYTES, "little", signed=True)


class DecoderMeasures:
    """Counted and read on the event loop."""

    def __init__(self, worker: Worker) -> None:
        self.bindings = self.failed_steps = 0
        self.is_bound = False
        self._worker = worker
        self._began = monotonic()
        self._step = Distribution(WORK_S)  # in seconds
        self._prepare_us = self._forward_us = self._sample_us = self._queue_us = 0
        self._computed = self._sampled = self._failed_rows = 0

    def answered(self, plan: Plan, result: StepResult) -> None:
        """A step's result has left. The plan has the drafts that were run."""
        # Where a step has left the caches cold, a sum by NumPy takes 14 us, and this 2.
        self._computed += sum(plan.row_count.tolist())
        times = result.times
        prepare, forward, sample = times.prepare_us, times.forward_us, times.sample_us
        self._prepare_us += prepare
        self._forward_us += forward
        self._sample_us += sample
        self._queue_us += times.queue_us
        self._step.add((prepare + forward + sample) / 1e6)
        tokens = result.tokens
        self._sampled += len(tokens) // _TOKEN_BYTES - tokens.count(_NO_TOKEN)
        self._failed_rows += len(result.failed)

    def read(self) -> Iterator[Measured]:
        """All series."""
        yield STEP.of(self._step)
        parts = {
            "prepare": self._prepare_us,
            "forward": self._forward_us,
            "sample": self._sample_us,
            "queue": self._queue_us,
        }
        yield PARTS.by(((part,), spent_us / 1e6) for part, spent_us in parts.items())
        yield IDLE.of(max(0.0, monotonic() - self._began - self._step.total))
        yield COMPUTED.of(self._computed)
        yield SAMPLED.of(self._sampled)
        yield FAILED_ROWS.of(self._failed_rows)
        yield FAILED_STEPS.of(self.failed_steps)
        yield BINDINGS.of(self.bindings)
        yield BOUND.of(int(self.is_bound))
        yield SEQUENCES.of(int(self._worker.slots.known.sum()))
        yield MEMORY.by(((kind,), size) for kind, size in self._memory())
        device = self._worker.device
        sizes = device.memory_by_kind()
        yield DEVICE_MEMORY.by(((device.name, kind), size) for kind, size in sizes.items())

    def _memory(self) -> Iterator[tuple[str, int]]:
        layers, limits = self._worker.caches, self._worker.limits
        values = [getattr(layer, field.name) for layer in layers for field in fields(layer)]
        # Keys and values may be halves of one tensor.
        storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
        cache = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
        yield "kv_cache", cache
        yield "host_kv_cache", cache // limits.num_blocks * limits.num_host_blocks
        yield "embeddings", self._worker.embeddings.nbytes
