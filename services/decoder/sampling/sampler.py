"""Chooses the next token of every sample of a step, each by the settings of its own slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.decoder.sampling.device_sampler import CANDIDATES, Draws
from services.decoder.sampling.logprobs import scores
from services.decoder.sampling.parameters import COLD, check_params
from services.decoder.sampling.processors import Adjustments, needs_adjustment
from services.decoder.sampling.random_numbers import uniform
from services.decoder.sampling.token_masks import TokenMasks, TokenMatcher
from services.decoder.sampling.truncation import Truncation, choose
from shared.errors import Internal, InvalidRequest, ServingError
from shared.step_columns import RESULT_COLUMNS
from tessera.common.v1.sampling_pb2 import SamplingParams

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

LogIds = np.ndarray[tuple[int], np.dtype[np.int32]]
LogVector = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass
class Choices:
    """What was chosen, in the order of the samples."""

    tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]"  # -1 where it failed
    failed: dict[int, ServingError] = field(default_factory=dict)  # by sample
    # Each asking sample's own log-probability, and its best ids with theirs.
    logprobs: dict[int, tuple[float, LogIds, LogVector]] = field(default_factory=dict)


class Sampler:
    """Settings and counts of every slot. A slot is known from `introduce` or `fork` to `drop`."""

    def __init__(
        self, max_slots: int, vocab_size: int, matcher: TokenMatcher | None = None
    ) -> None:
        """Without a `matcher` sequences with a grammar are refused."""
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_slots, np.float32)
        self._top_k = np.zeros(max_slots, np.int32)
        self._top_p = np.ones(max_slots, np.float64)
        self._min_p = np.zeros(max_slots, np.float64)
        self._seed = np.zeros(max_slots, np.uint64)
        self._choice = np.zeros(max_slots, np.uint64)
        self._logprobs = np.full(max_slots, -1, np.int32)  # -1: none asked
        self._plain = np.ones(max_slots, bool)  # greedy, unchanged logits, no log-probabilities
        self._drawable = np.ones(max_slots, bool)  # plain, or drawn from unchanged logits
        self._adjustments: dict[int, Adjustments] = {}
        self._masks = None if matcher is None else TokenMasks(matcher, vocab_size)

    def introduce(
        self, slot: int, choice: int, params: SamplingParams, prompt: Ids, output: Ids
    ) -> None:
        """Takes a sequence's settings. Raises InvalidRequest for what is wrong or not here yet."""
        check_params(params, with_grammars=self._masks is not None)
        greedy = params.temperature < COLD
        self._temperature[slot] = 1.0 if greedy else params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = 1.0 if greedy else params.top_p
        self._min_p[slot] = params.min_p
        if greedy:
            self._temperature[slot] = 0.0
        self._seed[slot] = params.seed
        self._choice[slot] = choice
        self._logprobs[slot] = params.logprobs if params.HasField("logprobs") else -1
        self.drop(slot)
        if self._masks is not None and params.grammar:
            self._masks.introduce(slot, params.grammar, output)
        if needs_adjustment(params):
            self._adjustments[slot] = Adjustments(params, self._vocab_size, prompt, output)
        self._set_plain(slot)

    def fork(self, child: int, parent: int, choice: int) -> None:
        """Copies the parent's settings and counts; random numbers follow the child's choice."""
        for array in (
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._seed,
            self._logprobs,
        ):
            array[child] = array[parent]
        self._choice[child] = choice
        self.drop(child)
        if parent in self._adjustments:
            self._adjustments[child] = self._adjustments[parent].fork()
        if self._masks is not None and parent in self._masks:
            self._masks.fork(child, parent)
        self._set_plain(child)

    def drop(self, slot: int) -> None:
        """Forgets what a slot held."""
        self._adjustments.pop(slot, None)
        if self._masks is not None:
            self._masks.drop(slot)

    def is_plain(self, slots: Ids) -> bool:
        """Whether all of them take the largest logit and want to know no more."""
        return bool(self._plain[slots].all())

    def is_drawable(self, slots: Ids) -> bool:
        """Whether `device_sampler` can choose for all of them."""
        return bool(self._drawable[slots].all())

    def draws(self, slots: Ids, output_lens: Ids) -> Draws:
        """What `device_sampler` needs to know of them; output_lens: as for `sample`."""
        settings = Truncation(
            self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots]
        )
        positions = output_lens.astype(np.uint64)
        return Draws(settings, uniform(self._seed[slots], self._choice[slots], positions))

    def take_largest(
        self,
        tokens: "np.ndarray[tuple[int], np.dtype[np.signedinteger]]",
        values: "np.ndarray[tuple[int], np.dtype[np.float32]]",
    ) -> Choices:
        """The choices of plain sequences, given the largest logit of each."""
        result = Choices(tokens.astype(np.int32))
        _fail_not_finite(result, values)
        return result

    def sample(self, logits: Floats, slots: Sequence[int] | Ids, output_lens: Ids) -> Choices:
        """Chooses for logits [samples, vocabulary], which it may overwrite.

        output_lens: tokens that each sequence has generated before this one.
        """
        index = np.asarray(slots, np.int64)
        rows = np.arange(len(index))
        if self.is_plain(index):
            best = logits.argmax(axis=1)
            return self.take_largest(best, logits[rows, best])
        raw = self._raw_scores(logits, index)
        if self._adjustments or self._masks is not None:
            logits = self._adjust(logits, index, output_lens)
        best = logits.argmax(axis=1)
        largest = logits[rows, best]
        tokens = best.astype(np.int64)
        warm = np.flatnonzero((self._temperature[index] > 0) & np.isfinite(largest))
        if len(warm):
            some = index[warm]
            draws = self.draws(some, output_lens[warm])
            tokens[warm] = choose(logits, warm, draws.settings, draws.numbers)
        result = Choices(tokens.astype(np.int32))
        _fail_not_finite(result, largest)
        _report(result, raw)
        return result

    def commit(self, slots: Ids, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        """Takes the chosen tokens into what later ones depend on: penalties, bad words, grammars."""
        if not self._adjustments and self._masks is None:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if token < 0:
                continue
            adjustments = self._adjustments.get(slot)
            if adjustments is not None:
                adjustments.commit(token)
            if self._masks is not None:
                self._masks.commit(slot, token)

    def _set_plain(self, slot: int) -> None:
        unchanged = self._logprobs[slot] < 0 and not self._is_adjusted(slot)
        self._plain[slot] = unchanged and self._temperature[slot] == 0
        self._drawable[slot] = unchanged and self._top_k[slot] < CANDIDATES

    def _is_adjusted(self, slot: int) -> bool:
        masked = self._masks is not None and slot in self._masks
        return masked or slot in self._adjustments

    def _raw_scores(self, logits: Floats, index: Ids) -> dict[int, "_Raw"]:
        """What the samples that ask for log-probabilities need of their logits as they came."""
        raw = {}
        for row in np.flatnonzero(self._logprobs[index] >= 0).tolist():
            slot = int(index[row])
            total, ids, values = scores(logits[row], int(self._logprobs[slot]))
            kept = logits[row].copy() if self._is_adjusted(slot) else logits[row]
            raw[row] = _Raw(kept, total, ids, values)
        return raw

    def _adjust(self, logits: Floats, index: Ids, output_lens: Ids) -> Floats:
        if not logits.flags.writeable:
            logits = logits.copy()
        for row, slot in enumerate(index.tolist()):
            adjustments = self._adjustments.get(slot)
            if adjustments is not None:
                adjustments.apply(logits[row], int(output_lens[row]))
        if self._masks is not None:
            self._masks.apply(logits, index.tolist())
        return logits

    def pack_logprobs(
        self, slots: Ids, ran: "np.ndarray[tuple[int], np.dtype[np.intp]]", chosen: Choices
    ) -> tuple[bytes, bytes, bytes]:
        """The result's logprobs, top_ids and top_logprobs for samples of `slots`, of which `ran`
        were sampled; NaN and -1 where there is nothing to tell. Empty if no sequence asked."""
        asked = np.where(self._logprobs[slots] >= 0)[0].tolist()
        if not asked:
            return b"", b"", b""
        own = np.full(len(slots), np.nan, RESULT_COLUMNS["logprobs"])
        told = {int(ran[sample]): entry for sample, entry in chosen.logprobs.items()}
        ids, values = [], []
        for sample in asked:
            k = min(int(self._logprobs[slots[sample]]), self._vocab_size)
            nothing = (np.nan, np.full(k, -1, np.int32), np.full(k, np.nan, np.float32))
            own[sample], best, best_values = told.get(sample, nothing)
            ids.append(best.astype(RESULT_COLUMNS["top_ids"]).tobytes())
            values.append(best_values.astype(RESULT_COLUMNS["top_logprobs"]).tobytes())
        return own.tobytes(), b"".join(ids), b"".join(values)


@dataclass(frozen=True, slots=True)
class _Raw:
    """The logits of one sample before they were adjusted, what they are above log-probabilities,
    and the most likely ids.
    """

    row: LogVector
    total: np.float64
    ids: LogIds
    values: LogVector


def _report(result: Choices, raw: dict[int, _Raw]) -> None:
    for sample, found in raw.items():
        if sample not in result.failed:
            own = float(np.float32(found.row[result.tokens[sample]] - found.total))
            result.logprobs[sample] = (own, found.ids, found.values)


def _fail_not_finite(
    result: Choices, largest: "np.ndarray[tuple[int], np.dtype[np.float32]]"
) -> None:
    """A row whose largest logit is not a number or infinite has no token."""
    finite = np.isfinite(largest)
    if finite.all():
        return
    for row in np.flatnonzero(~finite).tolist():
        result.tokens[row] = -1
        if np.isneginf(largest[row]):
            result.failed[row] = InvalidRequest(
                "NO_TOKEN_LEFT", "bias and allowed ids leave no token to choose", field="sampling"
            )
        else:
            result.failed[row] = nan_logits()


def nan_logits() -> Internal:
    """The failure of a row that did not compute to finite numbers."""
    return Internal("NAN_LOGITS", "the model's output is not finite for this sequence")
