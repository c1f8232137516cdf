"""Log-probabilities of a step's result as records of the token log."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence
from shared.queue.token_log import encode_records
from shared.step_columns import RESULT_COLUMNS
from tessera.decoder.v1 import decoder_pb2

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


class StepLogprobs:
    """What a decoder said of each token that it chose: its own log-probability and the most probable tokens."""

    def __init__(self, plan: StepPlan, result: decoder_pb2.StepResult) -> None:
        self._own: Floats = _column(result, "logprobs")
        self._ids: Ids = _column(result, "top_ids")
        self._values: Floats = _column(result, "top_logprobs")
        asked = np.array([max(0, s.num_logprobs) for s in plan.sample_sequence], np.int64)
        if result.drafted:
            asked = asked[plan.spread(_column(result, "drafted").tolist())]
        given = _as_given(asked, len(self._ids))
        self._end = np.cumsum(given)
        self._begin = self._end - given

    def own(self, sample: int) -> float:
        """The log-probability of the token that was sampled."""
        return float(self._own[sample])

    def top(self, sample: int) -> list[tuple[int, float]]:
        """The most probable tokens, descending."""
        some = slice(self._begin[sample], self._end[sample])
        return list(zip(self._ids[some].tolist(), self._values[some].tolist(), strict=True))

    def record(self, sample: int, token: int, k: int) -> bytes:
        """The record of a sampled token with its `k` best."""
        some = slice(self._begin[sample], self._end[sample])
        own = self._own[sample : sample + 1]
        return encode_records([token], own, self._ids[None, some], self._values[None, some], k)


def _column(message: decoder_pb2.StepResult | decoder_pb2.PromptLogprobs, name: str) -> Any:
    return np.frombuffer(getattr(message, name), RESULT_COLUMNS[name])


def _as_given(asked: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """How many were given for each sample: as many as asked, but none has more than the vocabulary."""
    size = int(asked.max(initial=0))
    while size and int(np.minimum(asked, size).sum()) > total:
        size -= 1
    return np.minimum(asked, size)


def prompt_records(
    plan: StepPlan, result: decoder_pb2.StepResult
) -> Iterator[tuple[Sequence, int, Floats, Ids, Floats]]:
    """For each row with log-probabilities of prompt tokens: its sequence, the index of the first of these tokens, their
    own log-probabilities [n], and ids and values of the best [n, k]."""
    for report in result.prompt_logprobs:
        sequence, start = plan.row_sequence[report.row], plan.row_start[report.row]
        own: Floats = _column(report, "logprobs")
        if len(own):
            ids: Ids = _column(report, "top_ids").reshape(len(own), -1)
            values: Floats = _column(report, "top_logprobs").reshape(len(own), -1)
            yield sequence, max(start, 1), own, ids, values
