"""What attention needs to know about a batch, made once a step and used by every layer."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shared.errors import InvalidRequest


@dataclass(frozen=True)
class AttnMeta:
    """The rows of a step: `n` sequences with T query tokens together, those with one token first.

    All lengths exist as host values, so that no op has to ask the device. T counts padding: tokens
    from `cu_q[-1]` on belong to no row, and their keys and values go to block 0.
    """

    n: int
    num_decodes: int  # rows with one query token; they come first
    cu_q: list[int]  # n + 1 offsets into the tokens, with the leading 0
    kv_lens: list[int]  # keys each row sees, its own included; not cumulative
    block_table: Tensor  # int32 [n, max_blocks]; 0 where a row has no block
    slots: Tensor  # int64 [T]: block * block_size + offset for each token; never negative
    max_q: int
    max_kv: int
    # Spans (row, start, end) of positions that see each other whole, for models that ask for it.
    bidirectional: list[tuple[int, int, int]] | None = None
    # Whatever a device prepares for its own kernels.
    device_state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KVSpec:
    """One layer's cache: sizes of a key and a value of one head, in elements.

    coded: as codes of 8 bits, with a scale for each token and head (`BaseOps.codes_cache`). kept: of each head of keys
    the elements that lie beside their codes as they are; empty where none of any head does.
    """

    num_kv_heads: int
    k_size: int
    v_size: int
    dtype: torch.dtype
    coded: bool = field(default=False, kw_only=True)
    kept: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer."""
        return self.num_kv_heads * (self.k_size + self.v_size) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Of a key and of a value alike. Raises InvalidRequest if they differ, for ops that do not have that."""
        if self.k_size != self.v_size:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"heads have keys of {self.k_size} and values of {self.v_size} elements, which --device cpu does"
                " not have",
                field="model",
            )
        return self.k_size


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache. Its layout is known to the ops that made it alone."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight in the form its device wants: weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Heads:
    """How a row of fused queries, keys and values divides: [num_q * size | num_kv * size | ...]."""

    num_q: int
    num_kv: int
    size: int


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each head's queries and keys before they are rotated: weights [size]."""

    q: Tensor
    k: Tensor
    eps: float
