"""The tensors of one step, made of the slot table and a plan's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.staging import Array
from services.decoder.steps.needs import AttentionKind
from services.decoder.steps.step import Step
from services.decoder.worker.inputs.adapted_tokens import adapted_tokens
from services.decoder.worker.inputs.attending import attending
from services.decoder.worker.inputs.media_rows import ReadRows, embedded, split_levels, tokens_of
from services.decoder.worker.inputs.rows import Longs, Rows
from services.decoder.worker.inputs.whole_spans import whole_spans
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks, KeptMedia
from services.decoder.worker.slots.slot_states import StateRows
from services.decoder.worker.slots.slots import SlotTable

Integers = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]


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
    new_media: Sequence[KeptMedia] = ()  # whose keys it writes, where layers attend to them


class Inputs:
    """Makes the tensors of steps; no step leaves anything here."""

    def __init__(
        self,
        slots: SlotTable,
        device: Device,
        read: ReadRows,
        levels: int = 0,
        attention: AttentionKind = AttentionKind.CAUSAL,
        last_tokens: Tensor | None = None,
        encoder: EncoderBlocks | None = None,
    ) -> None:
        """levels: see `DecoderModel.levels`; last_tokens: int32 [slots] on the device, from which ids that are PENDING
        are taken; None where there are none; encoder: of a model whose layers attend to media."""
        self._slots, self._device, self._read = slots, device, read
        self._levels, self._attention = levels, attention
        self._last_tokens = last_tokens
        self._encoder = encoder

    def build(
        self,
        rows: Rows,
        ends: Longs,
        extra: Sequence[Array] = (),
        least_rows: int = 0,
        states: StateRows | None = None,
        new_media: Sequence[KeptMedia] = (),
    ) -> Batch:
        """The batch of `order_rows(...)`; every row fits its history and its block table.

        ends: where each row ends in the batch; extra: arrays that are sent in the same transfer; least_rows: if there
        are fewer, they are filled up with sequences of one token that nobody asked for, where all rows have one;
        states: of the rows, where layers keep state; new_media: whose keys are to be written.
        """
        slots, device = self._slots, self._device
        lengths = rows.end.tolist()
        tokens = self._tokens(rows, ends, least_rows)
        padded = len(tokens.ids)
        embeds, runs = embedded(rows, ends - rows.count, slots, self._read)
        deeper: list[Tensor] = []
        if self._levels and runs:
            embeds, deeper = split_levels(embeds, runs, self._levels, padded)
        optional: dict[str, Array] = {}
        if runs:
            optional["media"] = tokens_of(runs)
        adapted = adapted_tokens(slots.adapter, rows, tokens.owners)
        optional |= {str(number): places for number, places in adapted.items()}
        if self._last_tokens is not None and (tokens.ids < 0).any():
            optional["owners"] = _padded(tokens.owners, padded)
        if states is not None:
            optional["read"], optional["write"] = states.read, states.write
        attended = None
        if self._encoder is not None:
            attended = attending(rows, ends, self._encoder, new_media, self._read)
        more = () if attended is None else attended.arrays
        blank = max(0, least_rows - len(lengths))
        table: Array = slots.table[rows.slot, : -(-max(lengths) // slots.block_size)]
        if blank:
            table = np.concatenate([table, np.zeros((blank, table.shape[1]), np.int32)])
        sent = device.upload(
            tokens.ids, tokens.positions, table, tokens.written, *extra, *optional.values(), *more
        )
        found = dict(zip(optional, sent[4 + len(extra) :], strict=False))
        rest = sent[len(sent) - len(more) :]
        if self._last_tokens is not None and "owners" in found:
            sent[0] = _with_pending(sent[0], self._last_tokens, found["owners"])
        slots_of_rows, counts = rows.slot.tolist(), rows.count.tolist()
        spans = whole_spans(self._attention, slots, slots_of_rows, rows.start.tolist(), lengths)
        ones = [1] * blank
        meta = device.ops.make_meta(counts + ones, lengths + ones, sent[2], sent[3], spans)
        return Batch(
            rows=rows,
            step=Step(
                ids=sent[0],
                positions=sent[1],
                meta=meta,
                slots=slots_of_rows,
                media=found.get("media"),
                levels=deeper,
                adapters=[(number, found[str(number)]) for number in adapted],
                states=() if states is None else states.on_device(found["read"], found["write"]),
                attending=None if attended is None else attended.on_device(device.ops, rest),
            ),
            embeds=embeds,
            runs=runs,
            last=ends - 1,
            token_rows=tokens.rows,
            blocks=tokens.blocks,
            written=tokens.written,
            extra=sent[4 : 4 + len(extra)],
            states=states,
            new_media=new_media,
        )

    def _tokens(self, rows: Rows, ends: Longs, least_rows: int) -> "_Tokens":
        slots = self._slots
        size = slots.block_size
        token_rows, places = _lay_out(rows, ends)
        owners = rows.slot[token_rows]
        blocks = slots.table[owners, places // size].astype(np.int64)
        padded = max(least_rows, self._device.ops.padded_rows(len(places)))
        written = _padded(blocks * size + places % size, padded)
        written[len(places) :] = np.arange(padded - len(places)) % size  # in block 0
        rotary = places[None] if slots.rotary is None else slots.rotary[:, owners, places]
        return _Tokens(
            token_rows,
            owners,
            blocks,
            _padded(slots.tokens[owners, places], padded),
            _padded(rotary, padded),
            written,
        )


class _Tokens(NamedTuple):
    """The tokens of a batch: of each its row, slot and block; then with padding its id, positions [axes, T], and place
    in the cache."""

    rows: Longs
    owners: Longs
    blocks: Longs
    ids: Longs
    positions: "np.ndarray[Any, np.dtype[np.int64]]"
    written: Longs


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
