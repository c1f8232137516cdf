"""The hook for grammars, with a matcher that knows which tokens may follow which."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from services.decoder.sampling.logits_processors.token_masks import Bits, Grammar
from services.decoder.sampling.sampler import Sampler
from shared.errors import InvalidRequest, ServingError
from tessera.common.v1.sampling_pb2 import SamplingParams

NONE = np.empty(0, np.int64)
VOCABULARY = 70


class Continuations:
    """An automaton whose states are tokens. Its grammar is a list of allowed pairs "a>b", with "^"
    for the beginning: "^>1 1>2 2>1 2>69".
    """

    def __init__(self) -> None:
        self._allowed: dict[int, dict[str, list[int]]] = {}
        self._last: dict[int, str] = {}

    def prepare(self, grammar: Grammar) -> tuple[dict[str, list[int]], str]:
        """The hook's method."""
        allowed: dict[str, list[int]] = {}
        for pair in grammar.text.split():
            before, arrow, after = pair.partition(">")
            if not arrow:
                raise InvalidRequest("INVALID_GRAMMAR", f"{pair} is no pair", field="grammar")
            allowed.setdefault(before, []).append(int(after))
        last = "^"
        for token in grammar.output:
            _require(allowed, last, token)
            last = str(token)
        return allowed, last

    def introduce(self, slot: int, prepared: tuple[dict[str, list[int]], str]) -> None:
        """The hook's method."""
        self._allowed[slot], self._last[slot] = prepared

    def fork(self, child: int, parent: int) -> None:
        """The hook's method."""
        self._allowed[child], self._last[child] = self._allowed[parent], self._last[parent]

    def drop(self, slot: int) -> None:
        """The hook's method."""
        del self._allowed[slot], self._last[slot]

    def commit(self, slot: int, token: int) -> None:
        """The hook's method."""
        _require(self._allowed[slot], self._last[slot], token)
        self._last[slot] = str(token)

    def fill(self, bitmask_rows: Bits, slots: Sequence[int]) -> dict[int, ServingError]:
        """The hook's method."""
        for row, slot in zip(bitmask_rows, slots, strict=True):
            row[:] = 0
            for token in self._next(slot):
                row[token // 32] |= np.uint32(1 << token % 32)
        return {}

    def _next(self, slot: int) -> list[int]:
        return self._allowed[slot].get(self._last[slot], [])

    def __len__(self) -> int:
        return len(self._last)


def _require(allowed: dict[str, list[int]], last: str, token: int) -> None:
    if token not in allowed.get(last, []):
        raise InvalidRequest("GRAMMAR_LEFT", f"{token} is not allowed here", field="grammar")


def params(grammar: str = "", **changes: object) -> SamplingParams:
    values = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 3}
    return SamplingParams(grammar=grammar, **{**values, **changes})  # type: ignore[arg-type]


def run(sampler: Sampler, slots: list[int], steps: int, first: int = 0) -> list[list[int]]:
    """The tokens of each slot when `steps` are sampled from random logits."""
    numbers = np.random.default_rng(11)
    found: list[list[int]] = [[] for _ in slots]
    for position in range(first, first + steps):
        logits = numbers.standard_normal((len(slots), VOCABULARY)).astype(np.float32)
        chosen = sampler.sample(logits, slots, np.full(len(slots), position))
        for tokens, token in zip(found, chosen.tokens.tolist(), strict=True):
            tokens.append(token)
        sampler.commit(np.asarray(slots), chosen.tokens)
    return found


GRAMMAR = "^>1 ^>40 1>2 1>69 2>1 2>2 40>69 69>1 69>40"


def follows(tokens: list[int], before: str = "^") -> bool:
    for token in tokens:
        if f"{before}>{token}" not in GRAMMAR.split():
            return False
        before = str(token)
    return True


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_output_follows_the_grammar_and_others_are_free(temperature: float) -> None:
    sampler = Sampler(3, VOCABULARY, Continuations())
    sampler.introduce(0, 0, params(GRAMMAR, temperature=temperature), NONE, NONE)
    sampler.introduce(1, 0, params(temperature=temperature), NONE, NONE)
    sampler.introduce(2, 0, params(GRAMMAR, temperature=temperature, seed=9), NONE, NONE)
    first, free, third = run(sampler, [0, 1, 2], 40)
    assert follows(first) and follows(third) and not follows(free)
    plain = Sampler(3, VOCABULARY)
    plain.introduce(0, 0, params(temperature=temperature), NONE, NONE)
    assert len(set(free)) > 10 and len(run(plain, [0], 40)[0]) == 40


def test_a_sequence_that_comes_back_is_replayed() -> None:
    whole = Sampler(1, VOCABULARY, Continuations())
    whole.introduce(0, 0, params(GRAMMAR), NONE, NONE)
    tokens = run(whole, [0], 30)[0]
    back = Sampler(1, VOCABULARY, Continuations())
    back.introduce(0, 0, params(GRAMMAR), np.asarray([5]), np.asarray(tokens[:12]))
    assert follows(run(back, [0], 10, 12)[0], str(tokens[11]))


def test_forks_go_their_own_ways_and_slots_are_freed() -> None:
    matcher = Continuations()
    sampler = Sampler(4, VOCABULARY, matcher)
    sampler.introduce(0, 0, params(GRAMMAR), NONE, NONE)
    start = run(sampler, [0], 5)[0]
    sampler.fork(1, 0, 1)
    ours, theirs = run(sampler, [0, 1], 20, 5)
    assert follows(start + ours) and follows(start + theirs) and ours != theirs
    sampler.drop(0)
    sampler.introduce(1, 0, params(), NONE, NONE)
    assert len(matcher) == 0


def test_what_is_forbidden_stays_out_of_reach_of_other_settings() -> None:
    sampler = Sampler(1, VOCABULARY, Continuations())
    sampler.introduce(0, 0, params(GRAMMAR, logit_bias={3: 100.0}, logprobs=2), NONE, NONE)
    chosen = sampler.sample(np.zeros((1, VOCABULARY), np.float32), [0], np.zeros(1, np.int64))
    assert chosen.tokens[0] in (1, 40)
    own, _, _ = chosen.logprobs[0]
    assert own == pytest.approx(-np.log(VOCABULARY), rel=1e-5), "of the raw logits"


def test_a_dead_end_and_a_bad_grammar_are_errors_of_their_own() -> None:
    sampler = Sampler(2, VOCABULARY, Continuations())
    with pytest.raises(InvalidRequest) as caught:
        sampler.introduce(0, 0, params("nonsense"), NONE, NONE)
    assert caught.value.reason == "INVALID_GRAMMAR"
    sampler.introduce(0, 0, params("^>1"), NONE, np.asarray([1]))
    sampler.introduce(1, 0, params("^>1"), NONE, NONE)
    chosen = sampler.sample(np.zeros((2, VOCABULARY), np.float32), [0, 1], np.zeros(2, np.int64))
    assert chosen.failed[0].reason == "NO_TOKEN_LEFT" and chosen.tokens[1] == 1


def test_several_samples_of_a_slot_whose_grammar_is_late() -> None:
    sampler = Sampler(4, VOCABULARY, matcher := Continuations())
    prepared: Future[object] = Future()
    prepared.set_result(matcher.prepare(Grammar(GRAMMAR)))
    sampler.introduce(0, 0, params(GRAMMAR, temperature=0.0), NONE, NONE, prepared)
    logits = np.zeros((2, VOCABULARY), np.float32)
    found = sampler.sample(logits, [0, 0], np.array([0, 1]))
    assert not found.failed
    for token in found.tokens.tolist():
        sampler.commit(np.array([0]), np.array([token], np.int32))
    assert follows(found.tokens.tolist())
