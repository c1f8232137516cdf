"""The names of a sequence's blocks, by `shared/block_hash.py`."""

import array
import struct
import sys
from collections.abc import Sequence as Tokens

from services.scheduler.core.sequence import MediaSpan, Sequence
from shared.block_hash import block_names, root_name

_SWAP = sys.byteorder == "big"


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Appends the hashes of all blocks that have become full of committed tokens."""
    hashes, tokens = sequence.block_hashes, sequence.tokens
    begin = len(hashes) * block_size
    end = len(tokens) // block_size * block_size
    if begin >= end:
        return
    parent = hashes[-1] if hashes else root_of(sequence, block_size)
    ids = _packed(tokens[begin:end])
    media = sequence.media
    if not media or begin >= media[-1].end:
        hashes += block_names(parent, ids, block_size)
        return

    def extra(number: int) -> bytes:
        first = begin + number * block_size
        return _media_extra(media, first, first + block_size)

    hashes += block_names(parent, ids, block_size, extra)


def root_of(sequence: Sequence, block_size: int) -> bytes:
    """What stands for the parent of its first block."""
    return root_name(block_size, sequence.lora_id, sequence.cache_salt)


def _packed(tokens: Tokens[int]) -> bytes:
    ids = array.array("i", tokens)
    if _SWAP:
        ids.byteswap()
    return ids.tobytes()


def _media_extra(media: tuple[MediaSpan, ...], begin: int, end: int) -> bytes:
    """Digest and relative offset of every span that overlaps: placeholder ids alone do not tell images apart."""
    return b"".join(
        span.digest + struct.pack("<i", span.offset - begin)
        for span in media
        if span.offset < end and span.end > begin
    )
