"""What is chosen on the device is what the host chooses, or is left to the host."""

import numpy as np
import pytest
import torch

from services.decoder.sampling.device_sampler import CANDIDATES, Draws, draw
from services.decoder.sampling.truncation import Truncation

ROWS = 128


def draws(
    numbers: np.random.Generator,
    temperature: list[float],
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    rows: int = ROWS,
) -> Draws:
    """Settings drawn from these, for so many rows."""
    settings = Truncation(
        numbers.choice(temperature, rows).astype(np.float32),
        numbers.choice(top_k, rows).astype(np.int32),
        numbers.choice(top_p, rows).astype(np.float64),
        numbers.choice(min_p, rows).astype(np.float64),
    )
    return Draws(settings, numbers.random(rows))


def on_device(logits: np.ndarray, wanted: Draws) -> tuple[np.ndarray, np.ndarray]:
    tokens, largest = draw(torch.from_numpy(logits), torch.from_numpy(wanted.packed()))
    return tokens.numpy(), largest.numpy()


def on_host(logits: np.ndarray, wanted: Draws) -> np.ndarray:
    return wanted.choose(logits.copy(), np.arange(len(logits)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocabulary", [7, 500, CANDIDATES, 5000, 32000])
def test_tokens_are_those_of_the_host(vocabulary: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    spread = numbers.choice([1.5, 3, 6], (ROWS, 1))
    logits = (numbers.standard_normal((ROWS, vocabulary)) * spread).astype(np.float32)
    wanted = draws(
        numbers, [0, 0.3, 0.7, 1.0, 2.0], [0, 0, 1, 20, 50], [1.0, 0.9, 0.95], [0, 0, 0.05]
    )
    tokens, largest = on_device(logits, wanted)
    np.testing.assert_array_equal(largest, logits.max(axis=1))
    decided = tokens >= 0
    np.testing.assert_array_equal(tokens[decided], on_host(logits, wanted)[decided])
    if vocabulary <= CANDIDATES:
        assert decided.all()


@pytest.mark.parametrize("seed", range(4))
def test_equal_logits_are_told_apart_as_by_the_host(seed: int) -> None:
    """Logits of few digits, many of which are equal."""
    numbers = np.random.default_rng(seed)
    logits = numbers.standard_normal((ROWS, 3000)).round(1).astype(np.float32) * 4
    wanted = draws(numbers, [0, 0.7, 1.0], [0, 2, 20], [1.0, 0.5, 0.9], [0, 0.3])
    tokens, _ = on_device(logits, wanted)
    decided = tokens >= 0
    assert decided.sum() > ROWS / 2
    np.testing.assert_array_equal(tokens[decided], on_host(logits, wanted)[decided])


def test_only_rows_that_keep_too_much_are_left_to_the_host() -> None:
    numbers = np.random.default_rng(0)
    logits = numbers.standard_normal((ROWS, 20_000)).astype(np.float32)
    always = draws(numbers, [0, 1.0], [0, 1, CANDIDATES - 1], [1.0], [0])
    assert (on_device(logits, always)[0] >= 0).all()
    too_flat = draws(numbers, [1.0], [0], [0.95], [0])
    assert (on_device(logits, too_flat)[0] == -1).all()
    steep = draws(numbers, [0.1], [0], [0.95], [0])
    assert (on_device(logits, steep)[0] >= 0).all()


def test_a_flat_row_is_left_to_the_host_where_its_order_is_not_known() -> None:
    """Of equal logits at the border of the candidates the device has any."""
    flat = np.zeros((ROWS, 5000), np.float32)
    wanted = draws(np.random.default_rng(0), [1.0], [3], [1.0], [0])
    tokens, _ = on_device(flat, wanted)
    assert (tokens == -1).all()
    assert set(on_host(flat, wanted)) == {0, 1, 2}


def test_extreme_numbers_stay_within_what_is_kept() -> None:
    logits = np.full((2, 4000), -np.inf, np.float32)
    logits[:, [5, 900, 3777]] = [[0.0, 1.0, 0.5]]
    for top_k in (0, 2):
        settings = Truncation(
            np.ones(2, np.float32), np.full(2, top_k, np.int32), np.ones(2), np.zeros(2)
        )
        wanted = Draws(settings, np.asarray([0.0, 1 - 2.0**-53]))
        tokens, _ = on_device(logits, wanted)
        assert tokens.tolist() == on_host(logits, wanted).tolist()


def test_shares_are_those_of_the_softmax() -> None:
    probabilities = np.asarray([0.1, 0.3, 0.2, 0.4])
    logits = np.tile(np.log(probabilities).astype(np.float32), (20_000, 1))
    wanted = draws(np.random.default_rng(1), [1.0], [0], [1.0], [0], rows=20_000)
    observed = np.bincount(on_device(logits, wanted)[0], minlength=4)
    assert ((observed - 20_000 * probabilities) ** 2 / (20_000 * probabilities)).sum() < 16.3


def test_rows_that_are_not_finite_show_it_in_their_largest_logit() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 2000)).astype(np.float32)
    logits[1, 7] = np.nan
    wanted = draws(np.random.default_rng(1), [1.0], [20], [0.9], [0], rows=3)
    tokens, largest = on_device(logits, wanted)
    assert np.isfinite(largest).tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == on_host(logits, wanted)[[0, 2]].tolist()
