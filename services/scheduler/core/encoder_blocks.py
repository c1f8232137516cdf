"""Blocks of a decoder for the keys of media that its layers attend to."""

from collections import Counter

from services.scheduler.core.sequence import Sequence

_Media = tuple[bytes, ...]  # digests


class EncoderBlocks:
    """Counts those that are free. Sequences with the same media share theirs, from when the first gets a slot until the
    last gives it back."""

    def __init__(self, count: int, block_size: int) -> None:
        """count: 0 where layers attend to no media."""
        self.free = count
        self._is_used = count > 0
        self._block_size = block_size
        self._holders: Counter[_Media] = Counter()

    def has_for(self, sequence: Sequence) -> bool:
        """Whether blocks suffice for the media of a sequence."""
        if not self._is_used or not sequence.media or _media_of(sequence) in self._holders:
            return True
        return self.needed(sequence) <= self.free

    def needed(self, sequence: Sequence) -> int:
        """Blocks for the media of a sequence that shares them with none."""
        return -(-sum(span.rows for span in sequence.media) // self._block_size)

    def hold(self, sequence: Sequence) -> None:
        """A sequence has got a slot."""
        if not self._is_used or not sequence.media:
            return
        media = _media_of(sequence)
        if media not in self._holders:
            self.free -= self.needed(sequence)
        self._holders[media] += 1

    def release(self, sequence: Sequence) -> None:
        """A sequence has given its slot back."""
        if not self._is_used or not sequence.media:
            return
        media = _media_of(sequence)
        self._holders[media] -= 1
        if not self._holders[media]:
            del self._holders[media]
            self.free += self.needed(sequence)


def _media_of(sequence: Sequence) -> _Media:
    return tuple(span.digest for span in sequence.media)
