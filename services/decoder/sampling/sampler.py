"""Chooses the next token of every sample of a step, each by the settings of its own slot."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from services.decoder.sampling.choices import Choices, LogVector, RawLogits
from services.decoder.sampling.device_sampler import CANDIDATES, Draws
from services.decoder.sampling.guesses import Guesses
from services.decoder.sampling.logits_processors.processors import Adjustments, needs_adjustment
from services.decoder.sampling.logits_processors.token_masks import (
    Grammar,
    TokenMasks,
    TokenMatcher,
)
from services.decoder.sampling.parameters import COLD, check_params
from services.decoder.sampling.random_numbers import uniform
from services.decoder.sampling.split import Flags, Ids, Split
from services.decoder.sampling.truncation import Truncation, choose
from services.decoder.sampling.turns import repeats, turns
from tessera.common.v1.sampling_pb2 import SamplingParams

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Tokens = np.ndarray[tuple[int], np.dtype[np.signedinteger]]


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
        self._drawable = np.ones(max_slots, bool)  # `device_sampler` can choose
        self._lowered = np.zeros(max_slots, bool)  # plain, but for some logits that may be lowered
        self._guesses = Guesses(max_slots)
        self._adjustments: dict[int, Adjustments] = {}
        self._masks = None if matcher is None else TokenMasks(matcher, vocab_size)

    def prepare(self, params: SamplingParams, output: Ids) -> object:
        """What takes long of the introduction of a sequence with a grammar, which may be done on any thread: its result
        is what `introduce` takes as prepared. Raises ServingError for a grammar that the output does not follow."""
        return None if self._masks is None else self._masks.prepare(Grammar.of(params, output))

    def introduce(
        self,
        slot: int,
        choice: int,
        params: SamplingParams,
        prompt: Ids,
        output: Ids,
        prepared: "Future[object] | None" = None,
    ) -> None:
        """Takes a sequence's settings; prepared: of the work from `prepare`, which is waited for where the first token
        is chosen. Raises InvalidRequest for what is wrong or not here yet."""
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
        self._guesses.begin(slot)
        if self._masks is not None and params.grammar:
            self._masks.introduce(slot, Grammar.of(params, output), prepared)
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
        self._guesses.begin(child)
        self._fork_state(child, parent)
        self._set_plain(child)

    def drop(self, slot: int) -> None:
        """Forgets what a slot held."""
        self._adjustments.pop(slot, None)
        if self._masks is not None:
            self._masks.drop(slot)

    def is_plain(self, slots: Ids) -> bool:
        """Whether all of them take the largest logit and want to know no more."""
        return bool(self._plain[slots].all())

    def split(self, slots: Ids, *, device_draws: bool, guessed_rows: int = 0) -> Split:
        """Who chooses for the samples of a step, given the slot of each.

        device_draws: whether `device_sampler` runs where logits are computed. guessed_rows: up to how many samples the
        largest logits take clearly less time than all logits; 0 if they never do.
        """
        plain = self._plain[slots]
        if plain.all():
            return Split.largest(len(slots))
        none = np.zeros(len(slots), bool)
        if device_draws:
            on_device = self._drawable[slots]
            return Split(on_device, ~on_device | (self._logprobs[slots] >= 0), none)
        # Here one product gives the logits of all samples in the time of one sample's.
        if len(slots) <= guessed_rows and self._can_guess(slots, plain):
            return Split(~none, none, ~plain)
        return Split(none, ~none, none)

    def _can_guess(self, slots: Ids, plain: Flags) -> bool:
        lowered = slots[~plain]
        if not self._lowered[lowered].all() or repeats(lowered):
            return False
        return self._guesses.are_worth(lowered)

    def begin(self, slots: Ids) -> "list[Future[Any]]":
        """Prepares the choice of one token more for each of these slots, on other threads; what to wait for."""
        return self._masks.begin(slots) if self._masks else []

    def confirm(self, slots: Ids, output_lens: Ids, tokens: Tokens, values: LogVector) -> Flags:
        """Which tokens of guessed samples are those that `sample` would choose; values: the largest logits."""
        right = np.isfinite(values)
        if self._masks:
            right[list(self._masks.settle(slots))] = False
        given = zip(slots.tolist(), output_lens.tolist(), tokens.tolist(), strict=True)
        for place, (slot, output_len, token) in enumerate(given):
            right[place] = right[place] and self._keeps(slot, token, output_len)
            self._guesses.learn(slot, bool(right[place]))
        return right

    def _keeps(self, slot: int, token: int, output_len: int) -> bool:
        adjustments = self._adjustments.get(slot)
        if adjustments is not None:
            must_end = self._must_end(slot, adjustments, output_len)
            if not adjustments.keeps(token, output_len, must_end=must_end):
                return False
        return not self._masks or self._masks.allows(slot, token)

    def _must_end(self, slot: int, adjustments: Adjustments, output_len: int) -> bool:
        """Whether min_tokens forbids all that the slot's grammar allows."""
        if not self._masks or not adjustments.is_too_short(output_len):
            return False
        return self._masks.allows_only(slot, adjustments.stops)

    def draws(self, slots: Ids, output_lens: Ids) -> Draws:
        """What `device_sampler` needs to know of them; output_lens: as for `sample`."""
        settings = Truncation(
            self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots]
        )
        positions = output_lens.astype(np.uint64)
        return Draws(settings, uniform(self._seed[slots], self._choice[slots], positions))

    def take(self, tokens: Tokens, values: LogVector) -> Choices:
        """The choices that the device made, given the largest logit of each sample."""
        result = Choices(tokens.astype(np.int32))
        result.fail_not_finite(values)
        return result

    def wanted_logprobs(self, slots: Ids) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """[slots]: how many of the most likely ids each asks for with its log-probabilities; -1: it asks for none."""
        return self._logprobs[slots]

    def sample(self, logits: Floats, slots: Sequence[int] | Ids, output_lens: Ids) -> Choices:
        """Chooses for logits [samples, vocabulary], which it may overwrite.

        output_lens: tokens that each sequence has generated before this one. A slot may have several samples, at
        consecutive positions and in their order: each is chosen as if those before it had been committed.
        """
        index = np.asarray(slots, np.int64)
        several = self._dependent(index)
        if not several:
            return self._choose(logits, index, index, output_lens)
        # What depends on the tokens is copied under a number that is no slot, and goes ahead there.
        states = np.where(np.isin(index, several), ~index, index)
        try:
            for slot in several:
                self._fork_state(~slot, slot)
            return self._choose_in_turn(logits, index, states, output_lens)
        finally:
            for slot in several:
                self.drop(~slot)

    def _choose_in_turn(self, logits: Floats, index: Ids, states: Ids, output_lens: Ids) -> Choices:
        """First each slot's first sample, then each one's second."""
        result = Choices(np.full(len(index), -1, np.int32))
        for rows in turns(index):
            part = self._choose(logits[rows], index[rows], states[rows], output_lens[rows])
            result.put(rows, part)
            copies = states[rows] < 0
            self.commit(states[rows][copies], part.tokens[copies])
        return result

    def _choose(self, logits: Floats, index: Ids, states: Ids, output_lens: Ids) -> Choices:
        """One token for each row; states: the numbers of the slots, or of copies of what depends on their tokens."""
        rows = np.arange(len(index))
        if self._plain[index].all():
            best = logits.argmax(axis=1)
            return self.take(best, logits[rows, best])
        raw = self._raw_logits(logits, index)
        wrong = self._masks.settle(states) if self._masks else {}
        best = np.full(len(index), -1, np.int64)
        if self._adjustments or self._masks:
            self._choose_allowed(logits, index, states, best)
            logits = self._adjust(logits, states, output_lens, best < 0)
        for row in np.flatnonzero(best < 0).tolist():
            best[row] = logits[row].argmax()
        largest = logits[rows, best]
        tokens = best.copy()
        warm = np.flatnonzero((self._temperature[index] > 0) & np.isfinite(largest))
        if len(warm):
            draws = self.draws(index[warm], output_lens[warm])
            tokens[warm] = choose(logits, warm, draws.settings, draws.numbers)
        result = Choices(tokens.astype(np.int32))
        result.fail_not_finite(largest, self._masks.rows(states) if self._masks else ())
        for row, error in wrong.items():
            result.fail(row, error)
        for row, found in raw.items():
            result.report(row, found)
        return result

    def commit(self, slots: Ids, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        """Takes the chosen tokens into what later ones depend on: penalties, bad words, grammars."""
        if not self._adjustments and not self._masks:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if token < 0:
                continue
            adjustments = self._adjustments.get(slot)
            if adjustments is not None:
                adjustments.commit(token)
            if self._masks:
                self._masks.commit(slot, token)

    def _set_plain(self, slot: int) -> None:
        changed, scored = self._is_adjusted(slot), bool(self._logprobs[slot] >= 0)
        greedy = bool(self._temperature[slot] == 0)
        adjustments = self._adjustments.get(slot)
        only_lowered = adjustments is None or adjustments.only_lowers
        self._plain[slot] = greedy and not scored and not changed
        self._lowered[slot] = greedy and not scored and changed and only_lowered
        self._drawable[slot] = not changed and self._top_k[slot] < CANDIDATES

    def _fork_state(self, child: int, parent: int) -> None:
        """Copies what depends on the parent's tokens."""
        if parent in self._adjustments:
            self._adjustments[child] = self._adjustments[parent].fork()
        if self._masks is not None and parent in self._masks:
            self._masks.fork(child, parent)

    def _dependent(self, index: Ids) -> list[int]:
        """Slots with several samples, of which later ones depend on the tokens of earlier ones."""
        if not (self._adjustments or self._masks) or not repeats(index):
            return []
        found, counts = np.unique(index, return_counts=True)
        return [slot for slot in found[counts > 1].tolist() if self._is_adjusted(slot)]

    def _is_adjusted(self, slot: int) -> bool:
        masked = self._masks is not None and slot in self._masks
        return masked or slot in self._adjustments

    def _raw_logits(self, logits: Floats, index: Ids) -> dict[int, RawLogits]:
        """What the samples that ask for log-probabilities need of their logits as they came."""
        raw = {}
        for row in np.flatnonzero(self._logprobs[index] >= 0).tolist():
            slot = int(index[row])
            k, will_change = int(self._logprobs[slot]), self._is_adjusted(slot)
            raw[row] = RawLogits.of(logits[row], k, will_change=will_change)
        return raw

    def _choose_allowed(self, logits: Floats, index: Ids, states: Ids, best: Ids) -> None:
        """Of samples that take the largest logit, and of whose logits nothing changes but that a grammar allows few."""
        if not self._masks:
            return
        for row in np.flatnonzero(self._temperature[index] == 0).tolist():
            slot = int(states[row])
            if slot not in self._adjustments:
                token = self._masks.largest(logits[row], slot)
                best[row] = -1 if token is None else token

    def _adjust(self, logits: Floats, states: Ids, output_lens: Ids, wanted: Flags) -> Floats:
        """Those of some samples."""
        if not wanted.any():
            return logits
        if not logits.flags.writeable:
            logits = logits.copy()
        for row in np.flatnonzero(wanted).tolist():
            slot = int(states[row])
            adjustments = self._adjustments.get(slot)
            if adjustments is not None:
                output_len = int(output_lens[row])
                must_end = self._must_end(slot, adjustments, output_len)
                adjustments.apply(logits[row], output_len, must_end=must_end)
            if self._masks:
                self._masks.apply(logits[row], slot)
        return logits
