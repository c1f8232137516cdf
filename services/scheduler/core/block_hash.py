"""The name of a block's content: a hash chain, equal in every process and for every decoder of a model."""

import array
import hashlib
import struct
import sys
from collections.abc import Sequence as Tokens

from services.scheduler.core.sequence import MediaSpan, Sequence

_SWAP = sys.byteorder == "big"


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Appends the hashes of all blocks that have become full of committed tokens."""
    hashes, tokens = sequence.block_hashes, sequence.tokens
    for begin in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        end = begin + block_size
        extra = _media_extra(sequence.media, begin, end) if sequence.media else b""
        parent = hashes[-1] if hashes else _root(sequence, block_size)
        hashes.append(block_hash(parent, tokens[begin:end], extra))


def block_hash(parent: bytes, tokens: Tokens[int], extra: bytes) -> bytes:
    """16 bytes of blake2b over the parent (16 bytes), token ids (little-endian int32) and the rest."""
    ids = array.array("i", tokens)
    if _SWAP:
        ids.byteswap()
    return hashlib.blake2b(parent + ids.tobytes() + extra, digest_size=16).digest()


def _root(sequence: Sequence, block_size: int) -> bytes:
    lora = sequence.lora_id.encode()
    head = struct.pack("<iii", block_size, len(lora), len(sequence.cache_salt))
    return hashlib.blake2b(head + lora + sequence.cache_salt, digest_size=16).digest()


def _media_extra(media: tuple[MediaSpan, ...], begin: int, end: int) -> bytes:
    """Digest and relative offset of every span that overlaps: placeholder ids alone do not tell images apart."""
    return b"".join(
        span.digest + struct.pack("<i", span.offset - begin)
        for span in media
        if span.offset < end and span.end > begin
    )
