"""Prompts that become vectors: what is submitted with a step, and what the host makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.staging import Array
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.worker.inputs.rows import Longs, Rows
from services.decoder.worker.plans.plan import Plan
from services.decoder.worker.slots.kept_by_slot import Introduced, KeptBySlot
from shared.errors import InvalidRequest, Precondition
from tessera.common.v1.pooling_pb2 import PooledRows, PoolingHead, PoolingParams

_FLOATS = "<f4"  # as results have vectors

Wide = np.ndarray[Any, np.dtype[np.float64]]

_MEAN = PooledRows.POOLED_ROWS_MEAN
_TOKENS = PoolingHead.POOLING_HEAD_TOKENS
_SCORE = PoolingHead.POOLING_HEAD_SCORE


@dataclass(frozen=True)
class PooledRow:
    """A row of a step of which something is pooled: the tokens [first, end) of the batch, whose first one is `start` of
    its sequence. `place` is its index in the plan, `pool` that of the plan's pool which it ends, -1 if it ends none."""

    slot: int
    place: int
    start: int
    first: int
    end: int
    pool: int
    asked: PoolingParams


class Pooling(KeptBySlot):
    """Keeps what sequences are pooled to, and of those that all rows count for, the sum so far.

    Sums are float64 and are added up token by token: however a prompt was divided into rows, its mean is the same.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._asked: dict[int, PoolingParams] = {}
        self._sums: dict[int, tuple[int, Wide]] = {}

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`. Raises InvalidRequest for a vector that this model does not give."""
        message = sequence.message
        if not message.HasField("pooling"):
            if not self._model.generates:
                raise InvalidRequest(
                    "NO_OUTPUT_MATRIX",
                    "this checkpoint has no output matrix, so it generates nothing: start the gateway with another"
                    " --task than generate",
                )
            return
        asked = message.pooling
        width = self._width(asked)
        if width != asked.width:
            raise InvalidRequest(
                "OTHER_WIDTH",
                f"pooling: {asked.width} numbers are asked for, and this model gives {width}: gateway and decoder serve"
                " different models",
            )
        self._asked[slot] = asked

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        self._asked.pop(slot, None)
        self._sums.pop(slot, None)

    def begin(self, plan: Plan, rows: Rows, ends: Longs) -> Sequence[PooledRow]:
        """Of the rows that run, in a batch where these end at `ends`, those of which something is pooled."""
        if not self._asked:
            return ()
        pool_of = {row: pool for pool, row in enumerate(plan.pool_row.tolist())}
        found = []
        columns = (rows.slot, rows.place, rows.start, rows.count, ends)
        for slot, place, start, count, end in zip(*(c.tolist() for c in columns), strict=True):
            asked, pool = self._asked.get(slot), pool_of.get(place, -1)
            if asked is None:
                continue
            if asked.rows == _MEAN:
                found.append(PooledRow(slot, place, start, end - count, end, pool, asked))
            elif pool >= 0:
                found.append(PooledRow(slot, place, start + count - 1, end - 1, end, pool, asked))
        return found

    def submit(self, pooled: Sequence[PooledRow], hidden: Tensor) -> list[Tensor]:
        """What the host needs of the hidden rows [T, H], float32: the tokens of all `pooled` one after the other
        [tokens, H], then the logits that are asked for. Of several ranks all have to call it."""
        if not pooled:
            return []
        index = np.concatenate([np.arange(row.first, row.end) for row in pooled])
        wanted = [hidden.index_select(0, torch.from_numpy(index).to(hidden.device)).float()]
        scored = [row for row in pooled if row.asked.head == _TOKENS]
        if scored:
            last = torch.tensor([row.end - 1 for row in scored], device=hidden.device)
            logits = self._model.logits(hidden.index_select(0, last))
            of_tokens = [
                one.index_select(0, torch.tensor(list(row.asked.token_ids), device=one.device))
                for row, one in zip(scored, logits, strict=True)
            ]
            wanted.append(torch.cat(of_tokens))
        return wanted

    def divide(
        self, pooled: Sequence[PooledRow], arrived: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array]]:
        """What has arrived of a step, without what `submit` gave, and that."""
        if not pooled:
            return arrived, ()
        own = 1 + any(row.asked.head == _TOKENS for row in pooled)
        return arrived[:-own], arrived[-own:]

    def vectors(self, arrived: Sequence[Array]) -> "Vectors":
        """Of a step's pooled rows, by what has arrived of them."""
        return Vectors(self, arrived)

    def add(self, row: PooledRow, hidden: Array) -> bytes:
        """Takes the hidden rows [tokens, H] of a row; returns the vector, as results have it, where it ends a pool.
        Raises Precondition where tokens of a mean are missing: such sequences are computed from their beginning."""
        if row.asked.rows != _MEAN:
            return self._finished(row, hidden[-1])
        total: Wide = np.zeros(hidden.shape[1])
        if row.start:
            count, total = self._sums.get(row.slot, (0, total))
            if count != row.start:
                raise Precondition(
                    "POOLING_GAP",
                    f"a mean needs all tokens computed in order, not from {row.start}",
                )
        # Along the first axis numpy adds one row after the other.
        total = np.add.reduce(np.concatenate([total[None], hidden.astype(np.float64)]), axis=0)
        count = row.start + len(hidden)
        self._sums[row.slot] = count, total
        return self._finished(row, total / count)

    def _finished(self, row: PooledRow, vector: Any) -> bytes:
        if row.pool < 0:
            return b""
        head = self._model.score_head
        if row.asked.head == _SCORE and head is not None:
            # Each label's sum alone: however many there are, its bits are the same.
            vector = np.add.reduce(head.numpy().astype(np.float64) * vector, axis=1)
        packed: bytes = vector.astype(_FLOATS).tobytes()
        return packed

    def _width(self, asked: PoolingParams) -> int:
        """Numbers of the vector that is asked for. Raises InvalidRequest for one that this model does not have."""
        model = self._model
        if asked.head == PoolingHead.POOLING_HEAD_NONE:
            return model.config.hidden_size
        if asked.head == _SCORE and model.score_head is not None:
            return len(model.score_head)
        if asked.head == _TOKENS and model.generates and asked.rows != _MEAN:
            wrong = [i for i in asked.token_ids if not 0 <= i < model.config.vocab_size]
            if not wrong:
                return len(asked.token_ids)
            raise InvalidRequest(
                "INVALID_TOKEN",
                f"pooling: token {wrong[0]} is outside the vocabulary of {model.config.vocab_size}",
            )
        raise InvalidRequest(
            "NO_SUCH_HEAD",
            f"pooling: this model has no {PoolingHead.Name(asked.head)} for {PooledRows.Name(asked.rows)}: gateway and"
            " decoder serve different models",
        )


class Vectors:
    """What has arrived of the pooled rows of one step, row by row in their order."""

    def __init__(self, pooling: Pooling, arrived: Sequence[Array]) -> None:
        self._pooling = pooling
        self._hidden, self._scores = arrived[0], arrived[-1]
        self._token = self._score = 0

    def take(self, row: PooledRow, skip: bool) -> bytes:
        """The vector of the next row, empty where it ends none or is to be skipped. Raises as `Pooling.add` does."""
        hidden = self._hidden[self._token : self._token + row.end - row.first]
        self._token += len(hidden)
        if row.asked.head != _TOKENS:
            return b"" if skip else self._pooling.add(row, hidden)
        scores = self._scores[self._score : self._score + row.asked.width]
        self._score += len(scores)
        return b"" if skip else scores.astype(_FLOATS).tobytes()
