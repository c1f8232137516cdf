"""KV blocks of one decoder: who holds them, what they are named by, and which content can be found again."""

import array
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens

from services.scheduler.core.budget import AttentionKind, Capacity
from services.scheduler.core.sequence import MediaSpan, Sequence
from shared.block_hash import block_names, prefix_digest, root_name


class BlockManager:
    """Reference counts, the free list and the prefix cache of the blocks on the device. Block 0 is padding and never
    allocated.

    A block with a hash stays in the prefix cache after its last holder released it, until it is needed for something
    else: least recently released first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_total = num_blocks - 1
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))
        # Cached and held by nobody, oldest first. A plain dict finds its first entry by walking over what was deleted.
        self._reusable: OrderedDict[int, bytes] = OrderedDict()
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.queries = 0
        self.hits = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones that nobody holds included."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_total - self.num_free

    def refs(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Blocks with undefined content, held once. The caller has checked `num_free`."""
        blocks = [self._empty.pop() for _ in range(min(count, len(self._empty)))]
        while len(blocks) < count:
            block, content = self._reusable.popitem(last=False)
            del self._block_of[content]
            self._hash_of[block] = None
            blocks.append(block)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of leading blocks that are cached, without holding them."""
        found = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, content: bytes) -> bool:
        """Whether a block with this hash is cached."""
        return content in self._block_of

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that `find` returned or that another sequence holds."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._reusable[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Removes a holder, last block first: the end of a prompt is less likely to be asked for again."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            content = self._hash_of[block]
            if content is not None:
                self._reusable[block] = content
            else:
                self._empty.append(block)

    def register(self, blocks: Iterable[int], contents: Iterable[bytes]) -> None:
        """Adds held blocks to the prefix cache. Where a hash is cached already, the earlier block stays in it."""
        names, block_of = self._hash_of, self._block_of
        for block, content in zip(blocks, contents, strict=True):
            if names[block] is None and block_of.setdefault(content, block) == block:
                names[block] = content

    def adopt(self, contents: Mapping[int, bytes]) -> None:
        """Adds blocks whose content a decoder kept from an earlier binding. No block may be held yet."""
        for block, content in contents.items():
            if 0 < block < len(self._refs) and content not in self._block_of:
                self._reusable[block] = content
                self._block_of[content] = block
                self._hash_of[block] = content
        self._empty = [block for block in self._empty if block not in self._reusable]

    def forget(self, block: int) -> None:
        """Removes a block from the prefix cache: it was never computed."""
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._block_of[content]
        if block in self._reusable:
            del self._reusable[block]
            self._empty.append(block)

    def contents(self, blocks: Iterable[int]) -> list[bytes | None]:
        """The hash under which each block is cached, or None."""
        return [self._hash_of[block] for block in blocks]


class HostBlocks:
    """Reference counts and the free list of blocks in host memory, which hold what was swapped out. Forks of a
    swapped-out sequence share its blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_total(self) -> int:
        """All blocks."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def refs(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Blocks that are held once. The caller has checked `num_free`."""
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that are held."""
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a holder."""
        for block in blocks:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)


def extend_hashes(sequence: Sequence, capacity: Capacity) -> None:
    """Appends the hashes of all blocks that have become full of committed tokens (`shared/block_hash.py`); none where
    blocks are not reused."""
    if not capacity.reuses_blocks:
        return
    hashes, tokens, block_size = sequence.block_hashes, sequence.tokens, capacity.block_size
    begin = len(hashes) * block_size
    end = len(tokens) // block_size * block_size
    if begin >= end:
        return
    parent = hashes[-1] if hashes else root_of(sequence, capacity)
    ids = _packed(tokens[begin:end])
    media = sequence.media
    if not media or begin >= media[-1].end:
        hashes += block_names(parent, ids, block_size)
        return

    def extra(number: int) -> bytes:
        first = begin + number * block_size
        return _media_extra(media, first, first + block_size)

    hashes += block_names(parent, ids, block_size, extra)


def root_of(sequence: Sequence, capacity: Capacity) -> bytes:
    """The hash that stands for the parent of a sequence's first block; empty where blocks are not reused."""
    if not capacity.reuses_blocks:
        return b""
    prefix = b""
    if capacity.parts.attention is AttentionKind.PREFIX_LM:
        prompt = _packed(sequence.tokens[: sequence.prompt_len])
        prefix = prefix_digest(prompt, _media_extra(sequence.media, 0, sequence.prompt_len))
    return root_name(
        capacity.block_size,
        sequence.lora_id,
        sequence.cache_salt,
        prefix,
        sequence.content,
        capacity.kv_cache_dtype,
    )


def _packed(tokens: Tokens[int]) -> bytes:
    ids = array.array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _media_extra(media: tuple[MediaSpan, ...], begin: int, end: int) -> bytes:
    """Digest and relative offset of every span that overlaps: placeholder ids alone do not tell images apart."""
    return b"".join(
        span.digest + struct.pack("<i", span.offset - begin)
        for span in media
        if span.offset < end and span.end > begin
    )
