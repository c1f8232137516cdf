"""The sampler's distributions against transformers' own processors."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.decoder.sampling.logits_processors.processors import Adjustments
from services.decoder.sampling.logits_processors.repeated_ngrams import RepeatedNgrams
from services.decoder.sampling.logprobs import log_softmax, scores, top
from services.decoder.sampling.sampler import Sampler
from services.decoder.sampling.top_k import largest
from services.decoder.sampling.truncation import Truncation, choose
from tessera.common.v1.sampling_pb2 import SamplingParams, TokenSequence

NONE = np.empty(0, np.int64)
STEPS = 501  # numbers for each distribution, evenly spaced


def distribution(logits: np.ndarray, **settings: float) -> np.ndarray:
    """The share of each token when the uniform numbers are evenly spaced."""
    one = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    truncation = Truncation(
        np.full(STEPS, one["temperature"], np.float32),
        np.full(STEPS, one["top_k"], np.int32),
        np.full(STEPS, one["top_p"], np.float64),
        np.full(STEPS, one["min_p"], np.float64),
    )
    numbers = (np.arange(STEPS) + 0.5) / STEPS
    rows = np.zeros(STEPS, np.int64)  # every sample looks at the one row
    tokens = choose(logits[None], rows, truncation, numbers)
    return np.bincount(tokens, minlength=len(logits)) / STEPS


def reference(logits: np.ndarray, **settings: float) -> np.ndarray:
    """The same by transformers, in float64."""
    steps = LogitsProcessorList()
    if "temperature" in settings:
        steps.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        steps.append(TopKLogitsWarper(int(settings["top_k"])))
    if "top_p" in settings:
        steps.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        steps.append(MinPLogitsWarper(settings["min_p"]))
    changed: torch.Tensor = steps(
        torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits[None].astype(float))
    )
    return changed.softmax(-1)[0].numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.9},
        {"top_k": 5},
        {"top_k": 400},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.999, "temperature": 1.5},
        {"min_p": 0.05},
        {"min_p": 0.4, "temperature": 0.6},
        {"top_k": 30, "top_p": 0.8, "temperature": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [50, 6000])
def test_shares_are_those_of_transformers(settings: dict[str, float], size: int) -> None:
    logits = (np.random.default_rng(size).standard_normal(size) * 2.5).astype(np.float32)
    found, expected = distribution(logits, **settings), reference(logits, **settings)
    # A running sum of evenly spaced numbers is at most one of them off at each end.
    assert np.abs(found - expected).max() <= 1.01 / STEPS
    assert not found[expected == 0].any()


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    numbers = np.random.default_rng(3)
    logits = numbers.standard_normal(300).astype(np.float32)
    prompt, output = numbers.integers(0, 300, 40), numbers.integers(0, 300, 25)
    changed = logits.copy()
    params = SamplingParams(repetition_penalty=penalty, temperature=1, top_p=1)
    adjustments = Adjustments(params, 300, prompt, output[:5])
    for token in output[5:].tolist():
        adjustments.commit(token)
    adjustments.apply(changed, len(output))
    seen = torch.tensor(np.concatenate([prompt, output])[None])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, torch.tensor(logits[None]))
    np.testing.assert_allclose(changed, expected[0].numpy(), rtol=1e-6)


def test_output_penalties_are_those_of_the_formula() -> None:
    """OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    numbers = np.random.default_rng(4)
    logits = numbers.standard_normal(100).astype(np.float32)
    output = numbers.integers(0, 100, 200)
    params = SamplingParams(
        repetition_penalty=1, frequency_penalty=0.3, presence_penalty=-0.7, temperature=1, top_p=1
    )
    adjustments = Adjustments(params, 100, np.arange(100), output[:10])
    child = adjustments.fork()
    for token in output[10:].tolist():
        adjustments.commit(token)
    counts = np.bincount(output, minlength=100)
    for found, times in ((adjustments, counts), (child, np.bincount(output[:10], minlength=100))):
        changed = logits.copy()
        found.apply(changed, 0)
        np.testing.assert_allclose(changed, logits - 0.3 * times + 0.7 * (times > 0), rtol=2e-5)


def test_bad_words_are_those_of_transformers() -> None:
    numbers = np.random.default_rng(8)
    words = [[3], [1, 2], [2, 2, 1], [0, 1, 0, 1], [4, 4]]
    params = SamplingParams(
        repetition_penalty=1,
        temperature=1,
        top_p=1,
        bad_words=[TokenSequence(ids=word) for word in words],
    )
    adjustments = Adjustments(params, 6, NONE, NONE)
    oracle = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([99]))
    output: list[int] = []
    for token in numbers.integers(0, 5, 300).tolist():
        output.append(token)
        adjustments.commit(token)
        changed = np.zeros(6, np.float32)
        adjustments.apply(changed, len(output))
        expected = oracle(torch.tensor([output]), torch.zeros(1, 6))[0].numpy()
        np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("size", [10, 1000, 40_000])
def test_log_probabilities_are_those_of_torch(size: int) -> None:
    rows = (np.random.default_rng(size).standard_normal((3, size)) * 4).astype(np.float32)
    expected = torch.tensor(rows, dtype=torch.float64).log_softmax(-1)
    np.testing.assert_allclose(log_softmax(rows), expected.numpy(), rtol=1e-5, atol=1e-6)
    for row, row_expected in zip(rows, expected, strict=True):
        total, ids, values = scores(row, 7)
        best = row_expected.topk(7)
        assert ids.tolist() == best.indices.tolist() == top(row, 7)[0].tolist()
        np.testing.assert_allclose(values, best.values.numpy(), rtol=1e-5)
        assert float(row[3] - total) == pytest.approx(float(row_expected[3]), rel=1e-5)


@pytest.mark.parametrize("k", [1, 5, 256, 999, 1000, 2000, 4999, 9000])
def test_the_largest_are_found_without_sorting(k: int) -> None:
    numbers = np.random.default_rng(k)
    rows = [
        numbers.standard_normal(5000),
        numbers.integers(0, 6, 5000),  # ties everywhere
        np.zeros(5000),
        np.where(np.arange(5000) % 1000 == 7, 1.0, -np.inf),
        np.full(5000, -np.inf),
        np.arange(5000)[::-1],
        numbers.choice([0.0, -0.0, 1.5, -1.5, 3e-42, -3e-42], 5000),
        numbers.standard_normal(1000),
        numbers.standard_normal(3),
    ]
    for row in (np.asarray(row, np.float32) for row in rows):
        ids, values = largest(row, k)
        expected = np.argsort(-row, kind="stable")[:k]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, row[expected])


def test_seeds_repeat_and_choices_differ() -> None:
    """A chi-square check over many seeds, and equal numbers for equal (seed, choice, position)."""
    logits = np.log(np.asarray([0.1, 0.2, 0.3, 0.4], np.float32))
    sampler = Sampler(64, 4)
    counts = np.zeros(4)
    drawn = []
    for seed in range(100):
        for slot in range(64):
            params = SamplingParams(temperature=1, top_p=1, repetition_penalty=1, seed=seed)
            sampler.introduce(slot, slot % 8, params, NONE, NONE)
        places = np.arange(64) // 8
        tokens = sampler.sample(np.tile(logits, (64, 1)), np.arange(64), places).tokens
        again = sampler.sample(np.tile(logits, (64, 1)), np.arange(64), places).tokens
        np.testing.assert_array_equal(tokens, again)
        drawn.append(tokens)
        counts += np.bincount(tokens, minlength=4)
    expected = np.asarray([0.1, 0.2, 0.3, 0.4]) * 6400
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 0.999 quantile, 3 degrees
    table = np.asarray(drawn)
    # Neighbouring seeds, choices and positions agree no more often than chance (30 %).
    for other in (np.roll(table, 1, 0), np.roll(table, 1, 1), np.roll(table, 8, 1)):
        assert abs((table == other).mean() - 0.3) < 0.03


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_runs_that_would_come_twice_are_those_of_transformers(size: int) -> None:
    """Token by token, from a state that was made anew, and for a fork."""
    numbers = np.random.default_rng(size)
    text = numbers.integers(0, 3, 200).tolist()
    processor = NoRepeatNGramLogitsProcessor(size)
    found = RepeatedNgrams(size, np.asarray(text[:2]), NONE)
    for length in range(2, len(text)):
        changed = processor(torch.tensor([text[:length]]), torch.zeros(1, 3))
        expected = set(torch.isneginf(changed[0]).nonzero().flatten().tolist())
        again = RepeatedNgrams(size, np.asarray(text[:1]), np.asarray(text[1:length]))
        assert set(found.forbidden().tolist()) == expected == set(again.forbidden().tolist())
        parent, found = found, found.fork()
        parent.commit(2)
        found.commit(text[length])
