"""Embeddings of media items: which must be encoded, which the decoder has, and how far a sequence may be planned."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from services.scheduler.core.sequence import MediaSpan, Sequence, SequenceStatus


class ItemStatus(Enum):
    """Where an item's embeddings are."""

    WANTED = "wanted"  # needed, not asked for
    ENCODING = "encoding"  # asked for
    FETCHING = "fetching"  # the decoder is told to fetch them
    READY = "ready"  # on the decoder


@dataclass(slots=True, eq=False)
class _Item:
    span: MediaSpan
    status: ItemStatus = ItemStatus.WANTED
    losses: int = 0
    # Those that have yet to compute past it.
    users: dict[int, Sequence] = field(default_factory=dict)

    @property
    def blocks_running(self) -> bool:
        """Whether a running sequence waits for it."""
        return any(user.status is SequenceStatus.RUNNING for user in self.users.values())


class MediaState:
    """The items that sequences of one decoder have yet to compute past, one entry for each digest.

    Encodes are asked for in queue order while the rows on their way stay below a budget, so that a long queue does not
    fill the encoder's cache with what is needed much later; one item is always let through.
    """

    def __init__(self, budget_rows: int, *, all_first: bool = False) -> None:
        """all_first: any token may see all media of its sequence, so that none is computed before all are there."""
        self._all_first = all_first
        self._budget = budget_rows
        self._rows = 0
        self._items: dict[bytes, _Item] = {}
        self._fetches: list[Any] = []
        self._releases: list[bytes] = []
        self._released: list[bytes] = []

    def add(self, sequence: Sequence) -> None:
        """A sequence needs its items."""
        for span in sequence.media:
            item = self._items.setdefault(span.digest, _Item(span))
            item.users[id(sequence)] = sequence

    def restarted(self, sequence: Sequence) -> None:
        """A sequence lost its blocks and needs all its items again."""
        sequence.num_media_passed = 0
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence needs nothing any more."""
        for span in sequence.media:
            self._stop_using(sequence, span)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence is planned up to `num_tokens`: it no longer needs the items before that."""
        while sequence.num_media_passed < len(sequence.media):
            span = sequence.media[sequence.num_media_passed]
            if span.end > num_tokens:
                break
            sequence.num_media_passed += 1
            # The same item may occur in a prompt twice.
            if all(
                later.digest != span.digest for later in sequence.media[sequence.num_media_passed :]
            ):
                self._stop_using(sequence, span)

    def plannable(self, sequence: Sequence, start: int) -> int:
        """How many tokens from `start` on can be planned now: up to the first span whose embeddings are not ready."""
        for span in sequence.media[sequence.num_media_passed :] if sequence.media else ():
            if span.end <= start:
                continue
            item = self._items.get(span.digest)
            if item is None or item.status is not ItemStatus.READY:
                return 0 if self._all_first else max(0, span.offset - start)
        return sequence.num_tokens - start

    def first_user(self, digest: bytes) -> Sequence | None:
        """Of those that have yet to compute past an item, the one that came first."""
        item = self._items.get(digest)
        return next(iter(item.users.values()), None) if item is not None else None

    def take_wanted(self) -> list[MediaSpan]:
        """Items to be encoded now, oldest first.

        What a running sequence waits for is let through whatever the budget: that sequence holds a slot and blocks
        which the users of earlier items may need before they can give their share of the budget back. So is, one at a
        time, what a sequence lacks that has a share of the budget which it may not be able to use before.
        """
        wanted, full = [], False
        for item in self._items.values():
            if item.status is not ItemStatus.WANTED:
                continue
            full = full or bool(self._rows and self._rows + item.span.rows > self._budget)
            if full and not (item.blocks_running or self._completes(item)):
                continue
            item.status = ItemStatus.ENCODING
            self._rows += item.span.rows
            wanted.append(item.span)
        return wanted

    def _completes(self, item: _Item) -> bool:
        """Whether a sequence that has other items lacks this one next, and none is on its way to it."""
        for user in item.users.values():
            items = [self._items[span.digest] for span in user.media[user.num_media_passed :]]
            statuses = {other.status for other in items}
            first = next(other for other in items if other.status is ItemStatus.WANTED)
            if first is item and statuses == {ItemStatus.WANTED, ItemStatus.READY}:
                return True
        return False

    def encoded(self, digest: bytes, artifact: Any) -> None:
        """The encoder has it."""
        item = self._items.get(digest)
        if item is not None and item.status is ItemStatus.ENCODING:
            item.status = ItemStatus.FETCHING
            self._fetches.append(artifact)

    def ready(self, digest: bytes) -> None:
        """The decoder has a copy, and the encoder may evict its own: else two sequences that each need two items might
        wait for each other while its cache is full.
        """
        item = self._items.get(digest)
        if item is not None and item.status is ItemStatus.FETCHING:
            item.status = ItemStatus.READY
            self._released.append(digest)

    def lost(self, digest: bytes) -> int:
        """The decoder could not get it, or no longer has it. Returns how often that has happened."""
        item = self._items.get(digest)
        if item is None:
            return 0
        if item.status in (ItemStatus.FETCHING, ItemStatus.READY):
            self._rows -= item.span.rows
            item.status = ItemStatus.WANTED
            item.losses += 1
        return item.losses

    def users(self, digest: bytes) -> list[Sequence]:
        """The sequences that wait for an item."""
        item = self._items.get(digest)
        return list(item.users.values()) if item is not None else []

    def take_fetches(self) -> list[Any]:
        """Artifacts that the next plan tells the decoder to fetch."""
        taken, self._fetches = self._fetches, []
        return taken

    def take_releases(self) -> list[bytes]:
        """Digests that the next plan tells the decoder to evict."""
        taken, self._releases = self._releases, []
        return taken

    def take_released(self) -> list[bytes]:
        """Digests that the encoder need not hold any more."""
        taken, self._released = self._released, []
        return taken

    def _stop_using(self, sequence: Sequence, span: MediaSpan) -> None:
        item = self._items.get(span.digest)
        if item is None or item.users.pop(id(sequence), None) is None or item.users:
            return
        del self._items[span.digest]
        if item.status is not ItemStatus.WANTED:
            self._rows -= item.span.rows
        if item.status in (ItemStatus.ENCODING, ItemStatus.FETCHING):
            self._released.append(span.digest)
        if item.status in (ItemStatus.FETCHING, ItemStatus.READY):
            self._releases.append(span.digest)
