"""What the sampler promises, on logits made here."""

from typing import Any

import numpy as np
import pytest

from services.decoder.sampling.choices import Choices, pack_logprobs
from services.decoder.sampling.random_numbers import uniform
from services.decoder.sampling.sampler import Sampler
from shared.errors import ServingError
from tessera.common.v1.sampling_pb2 import SamplingParams, TokenSequence

NONE = np.empty(0, np.int64)


def params(**changes: object) -> SamplingParams:
    values = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 5, "n": 1}
    return SamplingParams(**{**values, **changes})  # type: ignore[arg-type]


def draw(logits: list[float], count: int, first: int = 0, **changes: Any) -> list[int]:
    """Tokens at `count` output positions from the same logits."""
    sampler = Sampler(1, len(logits))
    sampler.introduce(0, 0, params(seed=7, **changes), NONE, NONE)
    rows = np.tile(np.asarray(logits, np.float32), (count, 1))
    slots = np.zeros(count, np.int64)
    return [int(t) for t in sampler.sample(rows, slots, np.arange(first, first + count)).tokens]


def one(sampler: Sampler, logits: np.ndarray, position: int = 0, slot: int = 0) -> Choices:
    row = np.asarray(logits, np.float32)[None].copy()
    return sampler.sample(row, [slot], np.asarray([position]))


def chi_square(tokens: list[int], probabilities: np.ndarray) -> float:
    observed = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_distributed_as_the_softmax_says(temperature: float) -> None:
    logits = np.asarray([1.0, 0.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.2])
    expected = np.exp(logits / temperature)
    tokens = draw(logits.tolist(), 20_000, temperature=temperature)
    assert chi_square(tokens, expected / expected.sum()) < 24.3  # 0.999 quantile, 7 degrees


def test_random_numbers_are_uniform_and_depend_on_each_part() -> None:
    zeros, order = np.zeros(10_000, np.uint64), np.arange(10_000, dtype=np.uint64)
    for parts in ((order, zeros, zeros), (zeros, order, zeros), (zeros, zeros, order)):
        numbers = uniform(*parts)
        assert numbers.min() >= 0 and numbers.max() < 1
        bins = np.bincount((numbers * 20).astype(int), minlength=20)
        assert ((bins - 500) ** 2 / 500).sum() < 43.8  # 0.999 quantile, 19 degrees
    assert (uniform(order, zeros, zeros, 1) != uniform(order, zeros, zeros)).all()


def test_random_numbers_are_these_in_every_version() -> None:
    one = np.ones(1, np.uint64)
    big = np.asarray([2**64 - 1], np.uint64)
    assert uniform(one, one, one)[0] == pytest.approx(UNIFORM_ONES, abs=0)
    assert uniform(big, one, one)[0] == pytest.approx(UNIFORM_BIG, abs=0)


def splitmix64(state: int) -> int:
    """As published, in unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def chain(seed: int, *parts: int) -> float:
    mixed = splitmix64(seed)
    for part in parts:
        mixed = splitmix64(mixed ^ part)
    return (mixed >> 11) * 2.0**-53


UNIFORM_ONES = chain(1, 1, 1, 0)
UNIFORM_BIG = chain(2**64 - 1, 1, 1, 0)


def test_the_token_is_the_inverse_of_the_cumulative_sum_in_id_order() -> None:
    logits = np.log(np.asarray([0.1, 0.2, 0.3, 0.4]))
    for position, token in enumerate(draw(logits.tolist(), 200)):
        expected = int(np.searchsorted([0.1, 0.3, 0.6, 1.0], chain(7, 0, position, 0), "right"))
        assert token == expected


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert draw([1.0, 3.0, 3.0, 0.0], 1, temperature=0.0) == [1]
    assert draw([1.0, 3.0, 3.0, 0.0], 1, temperature=0.0, logprobs=1) == [1]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.41}, {3, 1}),
        ({"top_p": 0.01}, {3}),
        ({"top_p": 0.99}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {3, 1, 2}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 2, "top_p": 0.6}, {3, 1}),
        ({"top_k": 2, "top_p": 0.5}, {3}),  # of the two that are left, 0.4 is 57 %
        ({"top_k": 3, "min_p": 0.7}, {3, 1}),
        ({"top_k": 1}, {3}),
    ],
)
def test_truncation_keeps_exactly(settings: dict[str, Any], kept: set[int]) -> None:
    logits = np.log([0.1, 0.3 - 1e-9, 0.2 + 1e-4, 0.4]).tolist()
    assert set(draw(logits, 3000, **settings)) == kept


def test_ties_at_the_border_go_to_the_lowest_ids() -> None:
    assert set(draw([0.0] * 6, 500, top_k=2)) == {0, 1}
    assert set(draw([0.0] * 10, 2000, top_p=0.25)) == {0, 1, 2}
    flat = [0.0] * 1000
    assert set(draw(flat, 3000, top_k=3)) == {0, 1, 2}
    assert max(draw(flat, 3000, top_p=0.5)) == 499


def naive(logits: np.ndarray, settings: SamplingParams, number: float) -> int:
    """The definition, one row at a time, in float64."""
    weights = np.exp(
        (logits - logits.max()) / np.float32(settings.temperature), dtype=np.float32
    ).astype(float)
    order = np.argsort(-logits, kind="stable")
    kept = order[weights[order] >= settings.min_p]
    if settings.top_k:
        kept = kept[: settings.top_k]
    if settings.top_p < 1:
        before = np.cumsum(weights[kept]) - weights[kept]
        kept = kept[before < settings.top_p * weights[kept].sum()]
    ids = np.sort(kept)
    return int(ids[np.searchsorted(np.cumsum(weights[ids]), number * weights[ids].sum(), "right")])


def test_large_vocabularies_and_mixed_settings_match_the_definition() -> None:
    numbers = np.random.default_rng(1)
    rows, vocabulary = 60, 3000
    sampler = Sampler(rows, vocabulary)
    settings = []
    for slot in range(rows):
        settings.append(
            params(
                temperature=float(numbers.choice([0.3, 1.0, 1.7])),
                top_k=int(numbers.choice([0, 0, 5, 300, 5000])),
                top_p=float(numbers.choice([1.0, 0.2, 0.9, 0.9999])),
                min_p=float(numbers.choice([0.0, 0.0, 0.001, 0.2])),
                seed=int(numbers.integers(2**63)),
            )
        )
        sampler.introduce(slot, slot % 3, settings[-1], NONE, NONE)
    logits = (numbers.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    positions = numbers.integers(0, 1000, rows)
    found = sampler.sample(logits.copy(), np.arange(rows), positions).tokens
    for slot in range(rows):
        number = chain(settings[slot].seed, slot % 3, int(positions[slot]), 0)
        assert found[slot] == naive(logits[slot], settings[slot], number), settings[slot]
    # Each row alone gives the same.
    for slot in range(rows):
        assert one(sampler, logits[slot], int(positions[slot]), slot).tokens[0] == found[slot]


def test_penalties() -> None:
    sampler = Sampler(3, 5)
    prompt, output = np.asarray([0, 0, 99, -3]), np.asarray([1, 1, 2])
    logits = np.asarray([2.0, 2.0, -1.0, 0.5, 0.5], np.float32)
    cases = [
        ({"repetition_penalty": 2.0}, [1.0, 1.0, -2.0, 0.5, 0.5]),
        ({"presence_penalty": 0.5}, [2.0, 1.5, -1.5, 0.5, 0.5]),
        ({"frequency_penalty": 0.5}, [2.0, 1.0, -1.5, 0.5, 0.5]),
    ]
    for slot, (changes, expected) in enumerate(cases):
        sampler.introduce(slot, 0, params(temperature=0.0, **changes), prompt, output)
        changed = logits.copy()
        sampler._adjustments[slot].apply(changed, 3)
        np.testing.assert_allclose(changed, expected)
    sampler.commit(np.asarray([2]), np.asarray([4], np.int32))
    changed = logits.copy()
    sampler._adjustments[2].apply(changed, 4)
    assert changed[4] == 0.0


def test_a_forks_counts_are_its_own() -> None:
    sampler = Sampler(2, 4)
    sampler.introduce(0, 0, params(temperature=0.0, frequency_penalty=1.0), NONE, NONE)
    sampler.fork(1, 0, 1)
    sampler.commit(np.asarray([0]), np.asarray([2], np.int32))
    logits = np.asarray([0.0, 0.1, 0.5, 0.0])
    assert one(sampler, logits, slot=0).tokens[0] == 1
    assert one(sampler, logits, slot=1).tokens[0] == 2


def test_bias_allowed_and_bad_ids_and_min_tokens() -> None:
    logits = [1.0, 5.0, 2.0, 0.0]
    assert draw(logits, 1, temperature=0.0, logit_bias={3: 10.0}) == [3]
    assert draw(logits, 1, temperature=0.0, bad_token_ids=[1]) == [2]
    assert draw(logits, 1, temperature=0.0, allowed_token_ids=[0, 3]) == [0]
    stops: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [1, 77]}
    assert draw(logits, 3, **stops) == [2, 2, 1]


def test_bad_words_are_forbidden_where_they_would_be_completed() -> None:
    words = [TokenSequence(ids=[1, 2]), TokenSequence(ids=[3]), TokenSequence(ids=[2, 1, 0])]
    sampler = Sampler(2, 4)
    # The prompt does not count; the output of a sequence that comes back does.
    bad = params(temperature=0.0, bad_words=words)
    sampler.introduce(0, 0, bad, np.asarray([1]), NONE)
    sampler.introduce(1, 0, bad, NONE, np.asarray([2, 1]))
    logits = np.asarray([2.0, 1.0, 3.0, 9.0])
    assert one(sampler, logits).tokens[0] == 2
    assert one(sampler, logits, slot=1).tokens[0] == 1, "neither 2 after 1, nor 0 after 2, 1"
    for token, expected in ((1, 0), (2, 2), (1, 1), (1, 0)):
        sampler.commit(np.asarray([0]), np.asarray([token], np.int32))
        assert one(sampler, logits).tokens[0] == expected, token
    sampler.fork(1, 0, 1)
    sampler.commit(np.asarray([0]), np.asarray([0], np.int32))
    assert one(sampler, logits, slot=0).tokens[0] == 2
    assert one(sampler, logits, slot=1).tokens[0] == 0


def test_adjusted_rows_leave_the_others_as_they_are() -> None:
    """Greedy, cold, warm, adjusted and asking rows in one batch choose as each does alone."""
    numbers = np.random.default_rng(5)
    vocabulary = 2000
    settings = [
        params(temperature=0.0),
        params(temperature=0.0, logprobs=3),
        params(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3),
        params(temperature=1.2, logit_bias={7: 5.0}, logprobs=0),
        params(temperature=0.7, allowed_token_ids=[5, 6, 1999]),
        params(temperature=1.0, top_p=0.8, frequency_penalty=0.5, bad_token_ids=[1, 2]),
        params(temperature=1.0, min_p=0.1, min_tokens=4, stop_token_ids=[3]),
    ]
    together, alone = Sampler(len(settings), vocabulary), Sampler(len(settings), vocabulary)
    history = numbers.integers(0, vocabulary, 50)
    for slot, setting in enumerate(settings):
        setting.seed = slot
        for sampler in (together, alone):
            sampler.introduce(slot, 0, setting, history[:30], history[30:])
    for position in range(20, 40):
        logits = (numbers.standard_normal((len(settings), vocabulary)) * 3).astype(np.float32)
        slots, places = np.arange(len(settings)), np.full(len(settings), position)
        found = together.sample(logits.copy(), slots, places)
        for slot in range(len(settings)):
            mine = one(alone, logits[slot], position, slot)
            assert mine.tokens[0] == found.tokens[slot]
            assert (0 in mine.logprobs) == (slot in found.logprobs) == (slot in (1, 3))
            alone.commit(np.asarray([slot]), mine.tokens)
        together.commit(slots, found.tokens)


def test_log_probabilities_are_of_the_raw_logits() -> None:
    sampler = Sampler(2, 4)
    wanted = params(temperature=0.0, logprobs=2, bad_token_ids=[3])
    sampler.introduce(0, 0, wanted, NONE, NONE)
    sampler.introduce(1, 0, params(temperature=0.0), NONE, NONE)
    logits = np.log(np.asarray([0.1, 0.2, 0.2, 0.5], np.float32))
    rows = np.stack([logits, logits])
    found = sampler.sample(rows.copy(), [1, 0], np.zeros(2, np.int64))
    slots, ran = np.asarray([1, 0]), np.asarray([0, 1])
    own, ids, values = pack_logprobs(sampler.wanted_logprobs(slots), ran, found, 4)
    assert list(found.tokens) == [3, 1]
    np.testing.assert_allclose(np.frombuffer(own, "<f4"), [np.nan, np.log(0.2)], rtol=1e-6)
    assert np.frombuffer(ids, "<i4").tolist() == [3, 1]
    np.testing.assert_allclose(np.frombuffer(values, "<f4"), np.log([0.5, 0.2]), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_fail_alone(temperature: float, bad: float) -> None:
    sampler = Sampler(2, 4)
    for slot in range(2):
        sampler.introduce(slot, 0, params(temperature=temperature), NONE, NONE)
    rows = np.asarray([[0.0, bad, 1.0, 0.0], [0.0, 9.0, 1.0, 0.0]], np.float32)
    found = sampler.sample(rows, [0, 1], np.zeros(2, np.int64))
    assert found.tokens[0] == -1 and found.tokens[1] >= 0
    assert {row: error.reason for row, error in found.failed.items()} == {0: "NAN_LOGITS"}


def test_nothing_left_to_choose_fails() -> None:
    sampler = Sampler(1, 3)
    nothing = params(temperature=1.0, allowed_token_ids=[1], bad_token_ids=[1])
    sampler.introduce(0, 0, nothing, NONE, NONE)
    assert one(sampler, np.zeros(3)).failed[0].reason == "NO_TOKEN_LEFT"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"top_k": -1}, "top_k"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {4: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_token_ids": [9]}, "bad_token_ids"),
        ({"bad_words": [TokenSequence(ids=[1, 4])]}, "bad_words"),
        ({"bad_words": [TokenSequence()]}, "bad_words"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    changes: dict[str, object], field: str
) -> None:
    sampler = Sampler(1, 4)
    with pytest.raises(ServingError) as caught:
        sampler.introduce(0, 0, params(**changes), NONE, NONE)
    assert caught.value.metadata["field"] == field
