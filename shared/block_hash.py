"""The name of a KV block's content: a hash chain, equal in all processes and for all decoders of the same weights."""

import functools
import struct
from collections.abc import Callable
from hashlib import blake2b

HASH_BYTES = 16


@functools.lru_cache
def root_name(
    block_size: int,
    lora_id: str,
    cache_salt: bytes,
    prefix: bytes = b"",
    content: bytes = b"",
    kv_cache_dtype: str = "",
) -> bytes:
    """What stands for the parent of a first block. `prefix`: `prefix_digest` of the tokens that see each other whole,
    on all of which every block depends; empty where there are none. `content`: the digest of the weights.
    `kv_cache_dtype`: of keys and values, where they are not kept as the model computes.
    """
    lora = lora_id.encode()
    head = struct.pack("<iii", block_size, len(lora), len(cache_salt))
    return blake2b(
        head + lora + cache_salt + prefix,
        digest_size=HASH_BYTES,
        key=content,
        person=_person(kv_cache_dtype),
    ).digest()


def _person(kv_cache_dtype: str) -> bytes:
    """Of any length in the 16 bytes that there are; empty for none, so that most names stay what they were."""
    return blake2b(kv_cache_dtype.encode(), digest_size=16).digest() if kv_cache_dtype else b""


def prefix_digest(ids: bytes, media: bytes) -> bytes:
    """16 bytes over the token ids (little-endian int32) of a prefix and what names its media."""
    head = struct.pack("<i", len(ids))
    return blake2b(head + ids + media, digest_size=HASH_BYTES).digest()


def block_names(
    parent: bytes, ids: bytes, block_size: int, extra: Callable[[int], bytes] | None = None
) -> list[bytes]:
    """Names of consecutive blocks: 16 bytes of blake2b over the name of the block before, the token ids and the rest.

    ids: little-endian int32, whole blocks; `extra(i)` is what else the content of the i-th of them is made of.
    """
    names = []
    size = 4 * block_size
    for number, first in enumerate(range(0, len(ids), size)):
        content = parent + ids[first : first + size]
        if extra is not None:
            content += extra(number)
        parent = blake2b(content, digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names
