"""The tensors of one step, made of the slot table and a plan's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.staging import Array
from services.decoder.media.media_spans import MediaSpan, contiguous_runs
from services.decoder.steps.needs import AttentionKind
from services.decoder.steps.step import Step
from services.decoder.worker.slots.slot_states import StateRows
from services.decoder.worker.slots.slots import SlotTable
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
class Batch:
    """T tokens, padding included; `rows` in the order of the batch: those of one token first."""

    rows: Rows
    step: Step
    embeds: Sequence[Tensor]
    runs: Sequence[tuple[int, int]]
    last: Longs  # each row's last token in the batch
    token_rows: Longs  # each token's row, without padding
    blocks: Longs  # each token's block, without padding
    written: Longs  # each token's place in the cache
    extra: Sequence[Tensor]  # what was sent along
    states: StateRows | None = None  # of `rows`, where layers keep state


def order_rows(rows: Rows) -> Rows:
    """Rows of one token first, otherwise as they were."""
    if bool((rows.count == 1).all()):
        return rows
    return rows.select(np.argsort(rows.count != 1, kind="stable"))


def build_batch(
    rows: Rows,
    ends: Longs,
    slots: SlotTable,
    device: Device,
    read: ReadRows,
    extra: Sequence[Array] = (),
    last_tokens: Tensor | None = None,
    levels: int = 0,
    attention: AttentionKind = AttentionKind.CAUSAL,
    least_rows: int = 0,
    states: StateRows | None = None,
) -> Batch:
    """Builds the batch of `order_rows(...)`; every row fits its history and its block table.

    ends: where each row ends in the batch; extra: arrays that are sent in the same transfer; last_tokens: int32 [slots]
    on the device, from which ids that are PENDING are taken; levels: see `DecoderModel.levels`; least_rows: if
    there are fewer, they are filled up with sequences of one token that nobody asked for, where all rows have one;
    states: of the rows, where layers keep state.
    """
    token_rows, places = _lay_out(rows, ends)
    owners = rows.slot[token_rows]
    size = slots.block_size
    blocks = slots.table[owners, places // size].astype(np.int64)
    blank = max(0, least_rows - len(rows.slot))
    padded = max(least_rows, device.ops.padded_rows(len(places)))
    ids = _padded(slots.tokens[owners, places], padded)
    written = _padded(blocks * size + places % size, padded)
    written[len(places) :] = np.arange(padded - len(places)) % size  # in block 0
    rotary = places[None] if slots.rotary is None else slots.rotary[:, owners, places]
    positions = _padded(rotary, padded)

    slots_of_rows, starts, lengths = rows.slot.tolist(), rows.start.tolist(), rows.end.tolist()
    width = -(-max(lengths) // size)
    embeds, runs = _embeds(rows, ends - rows.count, slots, read)
    deeper: list[Tensor] = []
    if levels and runs:
        embeds, deeper = _split_levels(embeds, runs, levels, padded)
    optional: dict[str, Array] = {}
    if runs:
        optional["media"] = _tokens_of(runs)
    if last_tokens is not None and (ids < 0).any():
        optional["owners"] = _padded(owners, padded)
    if states is not None:
        optional["read"], optional["write"] = states.read, states.write
    table: Array = slots.table[rows.slot, :width]
    if blank:
        table = np.concatenate([table, np.zeros((blank, width), np.int32)])
    sent = device.upload(ids, positions, table, written, *extra, *optional.values())
    found = dict(zip(optional, sent[4 + len(extra) :], strict=True))
    if last_tokens is not None and "owners" in found:
        sent[0] = _with_pending(sent[0], last_tokens, found["owners"])
    spans = whole_spans(attention, slots, slots_of_rows, starts, lengths)
    counts, lengths = rows.count.tolist() + [1] * blank, lengths + [1] * blank
    meta = device.ops.make_meta(counts, lengths, sent[2], sent[3], spans)
    return Batch(
        rows=rows,
        step=Step(
            ids=sent[0],
            positions=sent[1],
            meta=meta,
            slots=slots_of_rows,
            media=found.get("media"),
            levels=deeper,
            states=() if states is None else states.on_device(found["read"], found["write"]),
        ),
        embeds=embeds,
        runs=runs,
        last=ends - 1,
        token_rows=token_rows,
        blocks=blocks,
        written=written,
        extra=sent[4 : 4 + len(extra)],
        states=states,
    )


def _lay_out(rows: Rows, ends: Longs) -> tuple[Longs, Longs]:
    """Each token's row and position."""
    counts = rows.count
    total = int(ends[-1])
    if total == len(counts):  # nothing but rows of one token
        return ends - 1, rows.start
    token_rows = np.repeat(np.arange(len(counts)), counts)
    places = rows.start[token_rows] + np.arange(total) - np.repeat(ends - counts, counts)
    return token_rows, places


def _padded(values: Integers, width: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """int64 [..., width], with zeros."""
    count = values.shape[-1]
    if count == width:
        return values.astype(np.int64, copy=False)
    result = np.zeros((*values.shape[:-1], width), np.int64)
    result[..., :count] = values
    return result


def _with_pending(ids: Tensor, last_tokens: Tensor, owners: Tensor) -> Tensor:
    """Ids with those that the host does not know yet: each owner's last token."""
    return torch.where(ids < 0, last_tokens.index_select(0, owners).long(), ids)


def _tokens_of(runs: Sequence[tuple[int, int]]) -> Longs:
    """Those inside a run (first, count), ascending."""
    return np.concatenate([np.arange(first, first + count) for first, count in sorted(runs)])


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
