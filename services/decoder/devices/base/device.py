"""What a device decides: everything that is not the same on all of them is asked here."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.cache_budget import CacheBudget
from services.decoder.devices.base.graphs import Forward, Graphs
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.staging import Array, Download, Event, Staging
from services.decoder.sampling.logits_processors.token_masks import TokenMatcher
from services.decoder.sampling.sampler import Sampler
from services.decoder.steps.attention_meta import KVSpec
from shared import kv_cache_dtype
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest, ServingError
from shared.hardware.devices import require_dtype
from shared.weights import scheme

log = structlog.get_logger(__name__)

# Of linear layers: rows; tiles as a matrix unit reads them, where products are right, or faster too.
WeightLayout = Literal["nd", "nz", "auto"]


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory; this process could take `free` of them now."""

    free: int
    total: int


class Device(ABC):
    """One device, as the process that computes on it uses it; `ops` is its table of ops."""

    name: ClassVar[str]  # in `shared.hardware.devices`
    default_block_size: ClassVar[int] = 16  # tokens
    only_block_size: ClassVar[bool] = False  # whether there are no blocks of other sizes
    # Tokens of a step unless --max-num-batched-tokens says otherwise: 256 or 2,048, and the
    # seventeenth part that the scheduler leaves out while others generate.
    default_batched_tokens: ClassVar[int]
    # Whether the largest step is run whole at start; elsewhere one layer of it tells the rest.
    profile_in_full: ClassVar[bool] = True
    # Whether it computes while the host goes on: a step is then launched before the one before it is collected.
    asynchronous: ClassVar[bool] = True

    # Whether operators may be called in several forms, which `--npu-forms` chooses from.
    has_forms: ClassVar[bool] = False

    # Whether several ranks on one machine share its memory; by which calls of torch.distributed they reach each other.
    is_host: ClassVar[bool] = False
    rank_backend: ClassVar[str]

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        threads: int = 0,
        block_size: int = 0,
        small_model: bool = False,
        forms: str = "",
        weights: WeightLayout = "nd",
    ) -> None:
        """dtype: of weights, activations and cache. threads: on the host; block_size: tokens; for both 0 is the
        device's own choice. small_model: it has fewer than 100 million parameters. forms: `--npu-forms`; weights:
        `--npu-weights`. Raises InvalidRequest for a block size, forms or a layout that the device does not have."""
        if self.only_block_size and block_size not in (0, self.default_block_size):
            raise InvalidRequest(
                "UNSUPPORTED_BLOCK_SIZE",
                f"--block-size {block_size}: on {self.name} blocks have {self.default_block_size} tokens;"
                " leave the flag away",
                field="block_size",
            )
        if forms and not self.has_forms:
            raise InvalidRequest(
                "UNSUPPORTED_FORMS",
                f"--npu-forms {forms}: {self.name} has no forms of operators to choose from; leave the flag away",
                field="npu_forms",
            )
        if weights != "nd" and not self.has_forms:
            raise InvalidRequest(
                "UNSUPPORTED_LAYOUT",
                f"--npu-weights {weights}: {self.name} has one layout of weights; leave the flag away",
                field="npu_weights",
            )
        self.small_model, self.forms, self.weights = small_model, forms, weights
        self.block_size = block_size or self.default_block_size
        self.ops = self._make_ops(dtype, threads)

    @classmethod
    def choose_dtype(cls, asked: str, checkpoint: Checkpoint) -> torch.dtype:
        """The element type for `--dtype`. Raises InvalidRequest for one that the device does not compute in."""
        require_dtype(asked, cls.name)
        name = checkpoint.default_dtype(cls.name) if asked == "auto" else asked
        found: torch.dtype = getattr(torch, name)
        return found

    @abstractmethod
    def _make_ops(self, dtype: torch.dtype, threads: int) -> BaseOps:
        """The ops, for blocks of `block_size`."""

    @abstractmethod
    def numerics(self, *, by_torch: bool = False) -> str:
        """What bits depend on here beyond what the fingerprint has (`shared/numerics.py`): decoders where it is equal
        compute equal bits. by_torch: layers of the model are computed by modules of torch."""

    # Memory

    @abstractmethod
    def memory(self) -> Memory:
        """What there is now."""

    @abstractmethod
    def memory_by_kind(self) -> Mapping[str, int]:
        """Bytes of a device's memory by what they are, for metrics; any thread may ask."""

    def require_free(self, share: float | None, sharers: int) -> None:
        """Called before weights are loaded. Raises Unavailable where others have of the device's memory what
        `cache_budget` would give out."""
        return None

    @abstractmethod
    def cache_budget(
        self, share: float | None, sharers: int, step_bytes: int, reserved: int | None = None
    ) -> CacheBudget:
        """What the caches of one of `sharers` decoders may take, once the weights are loaded: of `share` of the
        device's memory (the device's own unless given) what `step_bytes`, the largest step, leaves. reserved: bytes
        for what the device's libraries take later, their own estimate unless given."""

    @abstractmethod
    def swap_bytes(self, sharers: int) -> int:
        """Bytes of host memory that blocks of one of `sharers` decoders may be swapped out to."""

    @abstractmethod
    def peak_bytes(self, run: Callable[[], None]) -> int:
        """How much more memory than now `run` takes at its highest; 0 where that cannot be measured."""

    def attention_bytes(self, spec: KVSpec, tokens: int) -> int:
        """What attention to a sequence of so many tokens takes beside what the profile's largest step tells of."""
        return 0

    def free_unused(self) -> None:  # noqa: B027
        """Gives back what the process holds of the device's memory and does not use. Most have nothing to do."""

    # Transfers

    def upload(self, *arrays: Array) -> list[Tensor]:
        """Tensors on the device with the content of host arrays, all in one transfer.

        They are views of one buffer, aligned to 64 bytes. Nothing waits for the transfer but what
        is computed later on the device.
        """
        return self._staging.upload(arrays)

    def download(self, *tensors: Tensor) -> Download:
        """Begins to bring tensors of 4-byte elements to the host, all in one transfer."""
        return self._staging.download(tensors)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self)

    def pin(self, size: int) -> Tensor:
        """Host memory [size] of bytes that the device copies from and to while the host goes on."""
        return torch.empty(size, dtype=torch.uint8)

    def copy_to_device(self, host: Tensor) -> Tensor:
        """Submits a copy of pinned bytes, uint8 [n]; gives that on the device."""
        return host.to(self.ops.device, non_blocking=True)

    def copy_to_host(self, here: Tensor, host: Tensor) -> None:
        """Submits a copy of bytes on the device, uint8 [n], into pinned memory of the same size."""
        host.copy_(here, non_blocking=True)

    def record_event(self) -> Event:
        """A mark after everything that has been submitted to the device."""
        raise NotImplementedError(f"{self.name} computes while the host waits")

    def copy_in(self, host: Tensor) -> Tensor:
        """A host tensor of any shape in the model's type on the device, complete when this returns. It does not wait
        for running steps, so other threads than the one that computes may call it."""
        return host.to(self.ops.device, self.ops.dtype)

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything submitted has been computed."""

    def bind_thread(self) -> None:  # noqa: B027
        """Called first by each thread that submits work or waits for it. Most devices need no more than their name."""

    # Graphs

    @property
    def has_graphs(self) -> bool:
        """Whether steps of one token a row can be captured here and replayed."""
        return False

    @property
    def graphs_take_coded_windows(self) -> bool:
        """Whether these may be steps of layers with a window or chunks whose keys and values are codes."""
        return True

    def make_graphs(self, forward: Forward, sizes: Sequence[int], axes: int, width: int) -> Graphs:
        """Graphs of steps of these numbers of rows, not captured yet; computes one step of each. forward: computes a
        step; axes: of rotary positions; width: blocks in a row of the table."""
        raise NotImplementedError(f"{self.name} has no graphs")

    def ended_within(self, what: str) -> bool:
        """Whether a process like this one came to its end in what `surviving` had been told of, as this one may too."""
        return False

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """Meanwhile this process does something that may leave the device useless for it."""
        yield

    # What is served

    def require_scheme(self, name: str) -> None:
        """Raises InvalidRequest unless `--quantization` may say this here."""
        if scheme.makes_codes(name):
            raise scheme.refused(
                name, f"on {self.name} no kernels multiply with codes; leave the flag away"
            )

    def find_scheme(self, name: str, parameters: int) -> scheme.Scheme | None:
        """What `--quantization` means here; see `shared.weights.scheme`."""
        return scheme.find_scheme(name, parameters)

    def require_kv_cache(self, name: str) -> None:
        """Raises InvalidRequest unless `--kv-cache-dtype` may say this here."""
        if name != kv_cache_dtype.AUTO:
            raise kv_cache_dtype.refused(
                name, f"on {self.name} nothing attends to codes; leave the flag away"
            )

    # Errors

    def translate(self, error: Exception) -> ServingError | None:
        """What an error of the device's libraries means and what helps; None where that is not known."""
        return None

    def explain(self, error: BaseException) -> None:
        """Of an error that is being handled: raises what `translate` makes of it, and logs it; does nothing where that
        is not known."""
        if isinstance(error, ServingError) or not isinstance(error, Exception):
            return
        known = self.translate(error)
        if known is not None:
            log.exception("the device failed", reason=known.reason)
            raise known from error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Whatever is raised meanwhile is explained."""
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    # Sampling

    def make_sampler(
        self, max_slots: int, vocab_size: int, matcher: TokenMatcher | None = None
    ) -> Sampler:
        """What chooses tokens from logits here: on the host unless the device has a faster way. matcher: of grammars;
        None: they are refused."""
        return Sampler(max_slots, vocab_size, matcher)
