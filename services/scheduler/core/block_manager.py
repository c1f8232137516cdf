"""KV blocks of one decoder: who holds them, and which content can be found again."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping


class BlockManager:
    """Reference counts, the free list and the prefix cache. Block 0 is padding and never given out.

    A block with a hash stays findable after its last holder released it, until it is needed for something else:
    least recently released first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_total = num_blocks - 1
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))
        # Findable, held by nobody, oldest first. A plain dict finds its first entry by walking over what was deleted.
        self._reusable: OrderedDict[int, bytes] = OrderedDict()
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.queries = 0
        self.hits = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now, the findable ones included."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_total - self.num_free

    def refs(self, block: int) -> int:
        """How many hold a block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Gives out blocks with unknown content. The caller has checked `num_free`."""
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
        """The longest run of leading blocks that are cached. Does not take hold of them."""
        found = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, content: bytes) -> bool:
        """Whether a content is cached."""
        return content in self._block_of

    def hold(self, blocks: Iterable[int]) -> None:
        """Takes hold of blocks that `find` returned."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._reusable[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Lets blocks go, the last one first: the end of a prompt is less likely to be asked for than its beginning."""
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
        """Makes held blocks findable. If a content is known elsewhere already, that block stays the one to find."""
        names, block_of = self._hash_of, self._block_of
        for block, content in zip(blocks, contents, strict=True):
            if names[block] is None and block_of.setdefault(content, block) == block:
                names[block] = content

    def adopt(self, contents: Mapping[int, bytes]) -> None:
        """Makes blocks findable whose content a decoder kept from an earlier binding. All blocks must be free."""
        for block, content in contents.items():
            if 0 < block < len(self._refs) and content not in self._block_of:
                self._reusable[block] = content
                self._block_of[content] = block
                self._hash_of[block] = content
        self._empty = [block for block in self._empty if block not in self._reusable]

    def forget(self, block: int) -> None:
        """Makes a block's content unfindable: it is about to change, or was never computed."""
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._block_of[content]
        if block in self._reusable:
            del self._reusable[block]
            self._empty.append(block)

    def contents(self, blocks: Iterable[int]) -> list[bytes | None]:
        """What can be found in each of them."""
        return [self._hash_of[block] for block in blocks]
