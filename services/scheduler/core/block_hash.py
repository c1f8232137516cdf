"""The name of a block's content: a hash chain, equal in every process and for every decoder of a model."""

import array
import functools
import struct
import sys
from collections.abc import Sequence as Tokens
from hashlib import blake2b

from services.scheduler.core.sequence import MediaSpan, Sequence

_SWAP = sys.byteorder == "big"


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Appends the hashes of all blocks that have become full of committed tokens.

    A hash is 16 bytes of blake2b over that of the block before, the token ids (little-endian int32) and the rest.
    """
    hashes, tokens = sequence.block_hashes, sequence.tokens
    begin = len(hashes) * block_size
    end = len(tokens) // block_size * block_size
    if begin >= end:
        return
    ids = _packed(tokens[begin:end])
    parent = hashes[-1] if hashes else _root(block_size, sequence.lora_id, sequence.cache_salt)
    for first in range(begin, end, block_size):
        at = 4 * (first - begin)
        content = parent + ids[at : at + 4 * block_size]
        if sequence.media:
            content += _media_extra(sequence.media, first, first + block_size)
        parent = blake2b(content, digest_size=16).digest()
        hashes.append(parent)


def _packed(tokens: Tokens[int]) -> bytes:
    ids = array.array("i", tokens)
    if _SWAP:
        ids.byteswap()
    return ids.tobytes()


@functools.lru_cache
def _root(block_size: int, lora_id: str, cache_salt: bytes) -> bytes:
    """What stands for the parent of a first block."""
    lora = lora_id.encode()
    head = struct.pack("<iii", block_size, len(lora), len(cache_salt))
    return blake2b(head + lora + cache_salt, digest_size=16).digest()


def _media_extra(media: tuple[MediaSpan, ...], begin: int, end: int) -> bytes:
    """Digest and relative offset of every span that overlaps: placeholder ids alone do not tell images apart."""
    return b"".join(
        span.digest + struct.pack("<i", span.offset - begin)
        for span in media
        if span.offset < end and span.end > begin
    )
