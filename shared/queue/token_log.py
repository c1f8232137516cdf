"""Records of the token log: a fixed size for each request, so that a length in bytes is a number of tokens.

A record is the int32 token id; where log-probabilities were asked for, (1 + k) pairs of int32 id and float32
log-probability follow, the sampled token's own first. The log of a pooled prompt has one record: in the token's place
the length of the vector, then the vector as float32. Little-endian.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def stride(logprobs: int | None, pooled_width: int = 0) -> int:
    """Bytes of a record; `logprobs` is the number of top log-probabilities, or None; `pooled_width` the numbers of a
    vector, where the log holds one in place of tokens."""
    if pooled_width:
        return 4 + 4 * pooled_width
    return 4 if logprobs is None else 4 + 8 * (1 + logprobs)


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Records of a request that asked for no log-probabilities."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def decode_tokens(records: bytes, record_stride: int = 4) -> list[int]:
    """Token ids of consecutive records. Ignores a cut-off record at the end."""
    count = len(records) // record_stride
    if record_stride == 4:
        tokens: list[int] = np.frombuffer(records, "<i4", count).tolist()
        return tokens
    rows = np.frombuffer(records, np.uint8, count * record_stride).reshape(count, record_stride)
    tokens = rows[:, :4].copy().view("<i4")[:, 0].tolist()
    return tokens


def encode_pooled(vector: bytes) -> bytes:
    """The one record of a pooled prompt, whose vector is float32."""
    return encode_tokens([len(vector) // 4]) + vector


def decode_pooled(record: bytes) -> npt.NDArray[np.float32]:
    """The vector of a pooled prompt's record."""
    return np.frombuffer(record, "<f4", offset=4)


def encode_records(
    tokens: Sequence[int],
    own: npt.NDArray[np.float32],
    top_ids: npt.NDArray[np.int32],
    top_logprobs: npt.NDArray[np.float32],
    k: int,
) -> bytes:
    """Records of n tokens with `k` top log-probabilities each.

    own: float32 [n], each token's own; top_ids, top_logprobs: [n, at least k], descending. Fewer than k, because the
    vocabulary has no more, are filled up with id -1 and NaN.
    """
    there = min(k, top_ids.shape[1])
    records = np.empty((len(tokens), 3 + 2 * k), "<i4")
    values = records.view("<f4")
    records[:, 0] = records[:, 1] = tokens
    values[:, 2] = own
    records[:, 3::2] = -1
    values[:, 4::2] = np.nan
    records[:, 3 : 3 + 2 * there : 2] = top_ids[:, :there]
    values[:, 4 : 4 + 2 * there : 2] = top_logprobs[:, :there]
    return records.tobytes()
