"""What was chosen for the samples of a step, and what is told of it."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from services.decoder.sampling.logprobs import scores
from services.decoder.sampling.split import Ids
from shared.errors import Internal, InvalidRequest, ServingError
from shared.step_columns import RESULT_COLUMNS

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
LogIds = np.ndarray[tuple[int], np.dtype[np.int32]]
LogVector = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass
class Choices:
    """What was chosen, in the order of the samples."""

    tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]"  # -1 where it failed
    failed: dict[int, ServingError] = field(default_factory=dict)  # by sample
    # Each asking sample's own log-probability, and its best ids with theirs.
    logprobs: dict[int, tuple[float, LogIds, LogVector]] = field(default_factory=dict)

    def put(self, rows: Ids, some: "Choices") -> None:
        """Takes over what was chosen for some of the samples, in the order of `rows`."""
        self.tokens[rows] = some.tokens
        self.failed.update({int(rows[row]): error for row, error in some.failed.items()})
        self.logprobs.update({int(rows[row]): told for row, told in some.logprobs.items()})

    def discard(self, sample: int) -> None:
        """A sample has no token, and that is no failure."""
        self.tokens[sample] = -1
        self.failed.pop(sample, None)
        self.logprobs.pop(sample, None)

    def fail(self, sample: int, error: ServingError) -> None:
        """A sample has no token, and nothing is told of it."""
        self.tokens[sample] = -1
        self.failed[sample] = error
        self.logprobs.pop(sample, None)

    def fail_not_finite(self, largest: LogVector, has_grammar: Collection[int] = ()) -> None:
        """A sample whose largest logit is not a number or infinite has no token; has_grammar: samples whose grammars
        forbade some."""
        finite = np.isfinite(largest)
        if finite.all():
            return
        for row in np.flatnonzero(~finite).tolist():
            self.tokens[row] = -1
            if np.isneginf(largest[row]):
                self.failed[row] = _none_left(row in has_grammar)
            else:
                self.failed[row] = nan_logits()

    def score(self, samples: Ids, wanted: LogIds, logits: Floats) -> None:
        """Adds the log-probabilities of some samples [n] from their unchanged logits [n, vocabulary]; wanted [n]: see
        `pack_logprobs`."""
        for sample, k, row in zip(samples.tolist(), wanted.tolist(), logits, strict=True):
            self.report(sample, RawLogits.of(row, k, will_change=False))

    def report(self, sample: int, raw: "RawLogits") -> None:
        """Adds the log-probabilities of a sample that has a token."""
        if sample not in self.failed:
            own = float(np.float32(raw.row[self.tokens[sample]] - raw.total))
            self.logprobs[sample] = (own, raw.ids, raw.values)


@dataclass(frozen=True, slots=True)
class RawLogits:
    """The logits of one sample before they were adjusted, what they are above log-probabilities,
    and the most likely ids.
    """

    row: LogVector
    total: np.float64
    ids: LogIds
    values: LogVector

    @classmethod
    def of(cls, row: LogVector, k: int, *, will_change: bool) -> "RawLogits":
        """With the k most likely ids; the logits are copied if they `will_change`."""
        total, ids, values = scores(row, k)
        return cls(row.copy() if will_change else row, total, ids, values)


def pack_logprobs(
    wanted: LogIds,
    ran: "np.ndarray[tuple[int], np.dtype[np.intp]]",
    chosen: Choices,
    vocab_size: int,
) -> tuple[bytes, bytes, bytes]:
    """The result's logprobs, top_ids and top_logprobs for the samples of a plan, of which `ran` were sampled; NaN and
    -1 where there is nothing to tell. Empty if none asked.

    wanted: by sample of the plan the number of ids, -1 where none are asked for.
    """
    is_asked = wanted >= 0
    if not is_asked.any():
        return b"", b"", b""
    asked = np.flatnonzero(is_asked).tolist()
    own = np.full(len(wanted), np.nan, RESULT_COLUMNS["logprobs"])
    told = {int(ran[sample]): entry for sample, entry in chosen.logprobs.items()}
    ids, values = [], []
    for sample in asked:
        k = min(int(wanted[sample]), vocab_size)
        nothing = (np.nan, np.full(k, -1, np.int32), np.full(k, np.nan, np.float32))
        own[sample], best, best_values = told.get(sample, nothing)
        ids.append(best.astype(RESULT_COLUMNS["top_ids"]).tobytes())
        values.append(best_values.astype(RESULT_COLUMNS["top_logprobs"]).tobytes())
    return own.tobytes(), b"".join(ids), b"".join(values)


def nan_logits() -> Internal:
    """The failure of a row that did not compute to finite numbers."""
    return Internal("NAN_LOGITS", "the model's output is not finite for this sequence")


def _none_left(has_grammar: bool) -> InvalidRequest:
    """The failure of a row in which what was asked for forbids every token."""
    reason, both = "NO_TOKEN_LEFT", "bias and allowed ids"
    if has_grammar:
        text = f"grammar: together with {both} it leaves no token to choose"
        return InvalidRequest(reason, text, field="grammar")
    return InvalidRequest(reason, f"{both} leave no token to choose")
