"""Pieces of a step's rows that the kernels' attention handles one by one."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta

# Rows (query, head) that one attention task handles: whole groups by vectors (12 rows) and by tiles (32).
_TASK_ROWS = 96

Tasks: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int32]]"


def find_tasks(meta: AttnMeta, share: int) -> Tasks:
    """Pieces of rows that attention handles one by one: row, first token in the batch, tokens, position of the first,
    and how many keys all of them see, 0 where each sees those up to its own; the longest rows' last pieces first, so
    that none is left to the end."""
    known: dict[int, Tasks] = meta.device_state.setdefault("tasks", {})
    if share not in known:
        most = max(1, _TASK_ROWS // share)
        if not meta.bidirectional and (whole := _whole_rows(meta, most)) is not None:
            known[share] = whole
            return whole
        tasks = []
        for row, (first, end, length) in enumerate(
            zip(meta.cu_q, meta.cu_q[1:], meta.kv_lens, strict=False)
        ):
            start = length - (end - first)
            for low, high, keys in _stretches(meta, row, start, length):
                for place in range(low, high, most):
                    count = min(most, high - place)
                    tasks.append((row, first + place - start, count, place, keys))
        tasks.sort(key=lambda task: -task[2] * (task[4] or task[3] + task[2]))
        known[share] = np.asarray(tasks, np.int32).reshape(-1, 5)
    return known[share]


def _whole_rows(meta: AttnMeta, most: int) -> "Tasks | None":
    """A task for each row, in the order of `find_tasks`; None where a row has no tokens or more than `most`. Steps that
    only generate take this path, in which Python does nothing for each row."""
    ends, lengths = np.asarray(meta.cu_q, np.int32), np.asarray(meta.kv_lens, np.int32)
    ends = ends[: len(lengths) + 1]
    counts = ends[1:] - ends[:-1]
    if not len(counts) or counts.min() < 1 or counts.max() > most:
        return None
    tasks = np.zeros((len(counts), 5), np.int32)
    tasks[:, 0] = np.arange(len(counts))
    tasks[:, 1], tasks[:, 2], tasks[:, 3] = ends[:-1], counts, lengths - counts
    work = counts.astype(np.int64) * lengths
    return tasks[(-work).argsort(kind="stable")]


def _stretches(meta: AttnMeta, row: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The positions [start, end) of a row, cut where spans begin and end that see each other whole: of each stretch its
    ends, and the end of the span it is in, 0 for none."""
    for other, low, high in sorted(meta.bidirectional or ()):
        low = max(low, start)
        if other == row and low < min(high, end):
            if start < low:
                yield start, low, 0
            start = min(high, end)
            yield low, start, start
    if start < end:
        yield start, end, 0


def find_chunk_tasks(
    meta: AttnMeta, share: int, chunk: int, block_size: int
) -> tuple[Tasks, Tensor]:
    """Tasks that end where chunks do, and a block table with a row for each chunk of each row of the step: a chunk is a
    sequence of its own, since it consists of whole blocks."""
    known: dict[tuple[int, int], tuple[Tasks, Tensor]]
    known = meta.device_state.setdefault("chunk tasks", {})
    if (share, chunk) in known:
        return known[share, chunk]
    width = chunk // block_size
    rows: dict[tuple[int, int], int] = {}
    pieces = []
    for row, token, count, start, _ in find_tasks(meta, share).tolist():
        end = start + count
        while start < end:
            number, place = divmod(start, chunk)
            size = min(end - start, chunk - place)
            own = rows.setdefault((row, number), len(rows))
            pieces.append((own, token, size, place, 0))
            start, token = start + size, token + size
    table = torch.zeros((len(rows), width), dtype=torch.int32)
    for (row, number), own in rows.items():
        blocks = meta.block_table[row, number * width : (number + 1) * width]
        table[own, : len(blocks)] = blocks
    known[share, chunk] = np.asarray(pieces, np.int32).reshape(-1, 5), table
    return known[share, chunk]
