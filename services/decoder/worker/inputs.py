"""The tensors of one step, made of the slot table and a plan's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.models.needs import AttentionKind
from services.decoder.models.step import Step
from services.decoder.worker.media_spans import MediaSpan, contiguous_runs
from services.decoder.worker.slots import PENDING, SlotTable
from services.decoder.worker.whole_spans import whole_spans

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Longs = np.ndarray[tuple[int], np.dtype[np.int64]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]
# Rows [first, last) of a span's embedding.
ReadRows = Callable[[MediaSpan, int, int], Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows of a plan that will run: `place` is each one's index in the plan."""

    place: Longs
    slot: Longs
    start: Longs
    count: Longs

    @property
    def end(self) -> Longs:
        """Number of computed tokens afterwards."""
        return self.start + self.count

    def select(self, index: Longs) -> "Rows":
        """Some of the rows, in the order given."""
        return Rows(self.place[index], self.slot[index], self.start[index], self.count[index])


@dataclass(frozen=True)
class SampledTokens:
    """Tokens that were chosen on the device: `tokens` [samples], one of each of `slots`."""

    slots: Longs
    tokens: Tensor


@dataclass(frozen=True)
class Batch:
    """T tokens, padding included; `rows` in the order of the batch: those of one token first."""

    rows: Rows
    step: Step
    embeds: Sequence[Tensor]
    runs: Sequence[tuple[int, int]]
    last: Longs  # each row's last token in the batch
    token_rows: Longs  # each token's row, without padding
    blocks: Longs  # each token's block, without padding


def order_rows(rows: Rows) -> Rows:
    """Rows of one token first, otherwise as they were."""
    if bool((rows.count == 1).all()):
        return rows
    return rows.select(np.argsort(rows.count != 1, kind="stable"))


def build_batch(
    rows: Rows,
    slots: SlotTable,
    device: Device,
    read: ReadRows,
    sampled: SampledTokens | None = None,
    levels: int = 0,
    attention: AttentionKind = AttentionKind.CAUSAL,
) -> Batch:
    """Builds the batch of `order_rows(...)`; every row fits its history and its block table. Ids that are PENDING are
    taken from `sampled`, what the step before this one chose. `levels`: see `DecoderModel.levels`."""
    token_rows, places, ends = _lay_out(rows)
    owners = rows.slot[token_rows]
    size = slots.block_size
    blocks = slots.table[owners, places // size].astype(np.int64)
    padded = device.ops.padded_rows(len(places))
    ids = _padded(slots.tokens[owners, places], padded)
    written = _padded(blocks * size + places % size, padded)
    rotary = places[None] if slots.rotary is None else slots.rotary[:, owners, places]
    positions = _padded(rotary, padded)

    slots_of_rows, starts, lengths = rows.slot.tolist(), rows.start.tolist(), rows.end.tolist()
    width = -(-max(lengths) // size)
    embeds, runs = _embeds(rows, ends - rows.count, slots, read)
    deeper: list[Tensor] = []
    if levels and runs:
        embeds, deeper = _split_levels(embeds, runs, levels, padded)
    flags = [_takes_embedding(padded, runs)] if runs else []
    sent = device.upload(ids, positions, slots.table[rows.slot, :width], written, *flags)
    spans = whole_spans(attention, slots, slots_of_rows, starts, lengths)
    meta = device.ops.make_meta(rows.count.tolist(), lengths, sent[2], sent[3], spans)
    return Batch(
        rows=rows,
        step=Step(
            ids=_with_pending(sent[0], ids, owners, device, sampled) if sampled else sent[0],
            positions=sent[1],
            meta=meta,
            slots=slots_of_rows,
            media=sent[4] if runs else None,
            levels=deeper,
        ),
        embeds=embeds,
        runs=runs,
        last=ends - 1,
        token_rows=token_rows,
        blocks=blocks,
    )


def _lay_out(rows: Rows) -> tuple[Longs, Longs, Longs]:
    """Each token's row and position, and where each row ends in the batch."""
    counts = rows.count
    ends = np.cumsum(counts)
    total = int(ends[-1])
    if total == len(counts):  # nothing but rows of one token
        return ends - 1, rows.start, ends
    token_rows = np.repeat(np.arange(len(counts)), counts)
    places = rows.start[token_rows] + np.arange(total) - np.repeat(ends - counts, counts)
    return token_rows, places, ends


def _padded(values: Integers, width: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """int64 [..., width]: padding is token 0 at position 0, written to block 0, which no row reads."""
    count = values.shape[-1]
    if count == width:
        return values.astype(np.int64, copy=False)
    result = np.zeros((*values.shape[:-1], width), np.int64)
    result[..., :count] = values
    return result


def _with_pending(
    sent: Tensor, ids: Longs, owners: Longs, device: Device, sampled: SampledTokens
) -> Tensor:
    """The ids on the device, with those that the host does not know yet."""
    pending = np.flatnonzero(ids == PENDING)
    if not len(pending):
        return sent
    order = np.argsort(sampled.slots)
    found = order[np.searchsorted(sampled.slots, owners[pending], sorter=order)]
    places, samples = device.upload(pending, found)
    return sent.index_copy(0, places, sampled.tokens.index_select(0, samples).long())


def _takes_embedding(tokens: int, runs: Sequence[tuple[int, int]]) -> Flags:
    """bool [tokens]: those inside a run (first, count)."""
    found: Flags = np.zeros(tokens, bool)
    for first, count in runs:
        found[first : first + count] = True
    return found


def _embeds(
    rows: Rows, first: Longs, slots: SlotTable, read: ReadRows
) -> tuple[list[Tensor], list[tuple[int, int]]]:
    embeds: list[Tensor] = []
    runs: list[tuple[int, int]] = []
    if not slots.media:
        return embeds, runs
    for row, slot in enumerate(rows.slot.tolist()):
        for span, low, high in spans_of(slots, slot, int(rows.start[row]), int(rows.end[row])):
            values = read(span, low, high)
            targets = span.positions[low:high] - rows.start[row] + first[row]
            taken = 0
            for start, count in contiguous_runs(targets):
                runs.append((start, count))
                embeds.append(values[taken : taken + count])
                taken += count
    return embeds, runs


def _split_levels(
    embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]], levels: int, tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Of rows [n, (1 + levels) * H] the first H, and the others of all runs as [tokens, H] for each level, zero
    elsewhere."""
    width = embeds[0].shape[1] // (1 + levels)
    deeper = [embeds[0].new_zeros((tokens, width)) for _ in range(levels)]
    for rows, (first, count) in zip(embeds, runs, strict=True):
        for level, part in enumerate(deeper, 1):
            part[first : first + count] = rows[:, level * width : (level + 1) * width]
    return [rows[:, :width] for rows in embeds], deeper


def spans_of(slots: SlotTable, slot: int, start: int, end: int) -> list[tuple[MediaSpan, int, int]]:
    """The media of a slot with an embedding row in [start, end), and which rows those are."""
    found = []
    if start < slots.prompt_len[slot]:
        for span in slots.media.get(slot, ()):
            low, high = np.searchsorted(span.positions, (start, end)).tolist()
            if low < high:
                found.append((span, low, high))
    return found
