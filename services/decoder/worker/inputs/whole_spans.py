"""Which positions see each other whole, for models whose attention is not causal everywhere."""

from collections.abc import Iterator

from services.decoder.media.media_spans import contiguous_runs
from services.decoder.steps.needs import AttentionKind
from services.decoder.worker.slots.slots import SlotTable

Span = tuple[int, int, int]  # row of the step, first position, position after the last


def whole_spans(
    attention: AttentionKind,
    slots: SlotTable,
    owners: list[int],
    starts: list[int],
    ends: list[int],
) -> list[Span]:
    """Of rows of the slots `owners` over positions [start, end): the spans that reach into them."""
    if attention is AttentionKind.CAUSAL:
        return []
    return [
        (row, low, high)
        for row, slot in enumerate(owners)
        for low, high in _of_slot(attention, slots, slot)
        if low < ends[row] and high > starts[row]
    ]


def _of_slot(attention: AttentionKind, slots: SlotTable, slot: int) -> Iterator[tuple[int, int]]:
    """The prefix, or the embedding rows of each media item: what stands between two of them is text."""
    if attention is AttentionKind.PREFIX_LM:
        yield 0, int(slots.prefix_len[slot])
        return
    for span in slots.media.get(slot, ()):
        for first, count in contiguous_runs(span.positions):
            yield first, first + count
