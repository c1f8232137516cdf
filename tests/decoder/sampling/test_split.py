"""Each sample is chosen by its own settings: whatever is beside it, at several positions of a slot, guessed or not."""

from typing import Any

import numpy as np
import pytest

from services.decoder.sampling.guesses import Guesses
from services.decoder.sampling.logits_processors.token_masks import TokenMatcher
from services.decoder.sampling.sampler import Sampler
from tessera.common.v1.sampling_pb2 import SamplingParams, TokenSequence
from tests.decoder.sampling.test_token_masks import Continuations

VOCABULARY = 70
PROMPT, OUTPUT = np.asarray([1, 2, 3, 4, 1, 2]), np.asarray([5, 6, 5])
ANYTHING = " ".join(f"{before}>{after}" for before in range(70) for after in range(0, 70, 3))
GRAMMAR = f"^>5 5>6 6>5 {ANYTHING}"
LOWERING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"allowed_token_ids": list(range(0, 70, 2))},
    {"bad_token_ids": list(range(1, 70, 3))},
    {"bad_words": [TokenSequence(ids=[word, next_one]) for word in range(70) for next_one in (7, 8)]},
    {"first_bad_token_ids": list(range(40))},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"logit_bias": dict.fromkeys(range(30), -2.0)},
    {"min_tokens": 8, "stop_token_ids": list(range(20, 60))},
    {"grammar": GRAMMAR},
]  # fmt: skip
RAISING: list[dict[str, Any]] = [
    {"repetition_penalty": 0.8},
    {"presence_penalty": -0.8},
    {"frequency_penalty": -0.3},
    {"logit_bias": {3: 0.5}},
    {"logit_bias": {3: float("nan")}},
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 5},
    {"logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 0.8, "logprobs": 3},
    {"temperature": 0.7, "grammar": GRAMMAR},
]


def params(**changes: Any) -> SamplingParams:
    values = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 3}
    return SamplingParams(**{**values, **changes})


def make(kinds: list[dict[str, Any]], matcher: TokenMatcher | None = None) -> Sampler:
    """One slot for each kind."""
    sampler = Sampler(len(kinds), VOCABULARY, matcher or Continuations())
    for slot, kind in enumerate(kinds):
        sampler.introduce(slot, slot, params(**kind), PROMPT, OUTPUT)
    return sampler


def random_logits(seed: int, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    numbers = np.random.default_rng(seed).standard_normal((rows, VOCABULARY)) * 2
    return numbers.round(1).astype(np.float32)  # some are equal


@pytest.mark.parametrize("count", [2, 5])
def test_several_positions_of_a_slot_are_those_chosen_one_at_a_time(count: int) -> None:
    kinds = [*LOWERING, *RAISING[:-1], *OTHERS]
    slots = np.arange(len(kinds))
    rows = random_logits(1, count * len(kinds)).reshape(count, len(kinds), VOCABULARY)
    one_at_a_time, expected = make(kinds), []
    for position in range(count):
        output_lens = np.full(len(kinds), len(OUTPUT) + position)
        expected.append(one_at_a_time.sample(rows[position].copy(), slots, output_lens))
        one_at_a_time.commit(slots, expected[-1].tokens)
    matcher = Continuations()
    together = make(kinds, matcher)
    grammars = len(matcher)
    for _ in range(2):  # choosing changes nothing
        chosen = together.sample(
            rows.reshape(-1, VOCABULARY).copy(),
            np.tile(slots, count),
            len(OUTPUT) + np.repeat(np.arange(count), len(kinds)),
        )
        told = [entry for each in expected for entry in each.tokens.tolist()]
        assert chosen.tokens.tolist() == told and not chosen.failed
    for position, each in enumerate(expected):
        for slot, (own, ids, values) in each.logprobs.items():
            found = chosen.logprobs[position * len(kinds) + slot]
            assert found[0] == own
            assert (found[1] == ids).all() and (found[2] == values).all()
    assert len(chosen.logprobs) == count * len(expected[0].logprobs)
    assert len(matcher) == grammars, "copies are dropped"


@pytest.mark.parametrize("kind", LOWERING)
def test_a_guess_that_is_confirmed_is_what_would_be_chosen(kind: dict[str, Any]) -> None:
    sampler, confirmed = make([{}, kind]), 0
    slots, output_lens = np.asarray([0, 1]), np.full(2, len(OUTPUT))
    for seed in range(300):
        logits = random_logits(seed, 2)
        raw = logits.argmax(axis=1)
        right = sampler.confirm(slots[1:], output_lens[1:], raw[1:], logits[1:].max(axis=1))
        chosen = sampler.sample(logits.copy(), slots, output_lens)
        assert chosen.tokens[1] == raw[1] or not right[0]
        assert chosen.tokens[0] == raw[0]
        confirmed += int(right[0])
    assert confirmed >= 10


def test_of_a_row_that_is_not_finite_nothing_is_confirmed() -> None:
    sampler = make([{"presence_penalty": 1.0}])
    for value in (np.nan, np.inf, -np.inf):
        given = np.asarray([50]), np.asarray([value], np.float32)
        assert not sampler.confirm(np.zeros(1, np.int64), np.zeros(1, np.int64), *given)[0]


def test_only_greedy_samples_whose_logits_are_lowered_are_guessed() -> None:
    for kind in LOWERING:
        split = make([{}, kind]).split(np.arange(2), device_draws=False, guessed_rows=4)
        assert split.guessed.tolist() == [False, True] and not split.needs_logits
    others = RAISING + OTHERS[1:]
    for kind in others:
        split = make([{}, kind]).split(np.arange(2), device_draws=False, guessed_rows=4)
        assert not split.guessed.any() and split.whole.all()
    sampler = make([LOWERING[0]] * 5)
    for slots in (np.arange(5), np.asarray([1, 1])):  # too many; of one slot two that depend
        split = sampler.split(slots, device_draws=False, guessed_rows=4)
        assert not split.guessed.any() and split.whole.all()


def test_where_the_device_draws_only_what_a_sample_needs_comes_to_the_host() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"logprobs": 1},
        LOWERING[0],
        {"grammar": GRAMMAR},
    ]
    split = make(kinds).split(np.arange(5), device_draws=True)
    assert split.on_device.tolist() == [True, True, True, False, False]
    assert split.whole_rows.tolist() == [2, 3, 4]
    assert split.logits_of(np.asarray([2, 4])).tolist() == [0, 2]


def test_a_slot_that_is_often_guessed_wrong_is_left_out_more_and_more() -> None:
    guesses, slot = Guesses(2), np.zeros(1, np.int64)
    tried = 0
    for _ in range(1000):
        if guesses.are_worth(slot):
            tried += 1
            guesses.learn(0, right=False)
    assert tried < 30
    assert guesses.are_worth(np.ones(1, np.int64)), "another slot is not concerned"
    guesses.begin(0)
    for _ in range(100):
        assert guesses.are_worth(slot)
        guesses.learn(0, right=True)
