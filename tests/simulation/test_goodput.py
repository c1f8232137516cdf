"""Asking for more than a system can do must not make it do less: requests answered in time, at several loads."""

import itertools

import pytest

from tests.simulation.goodput import capacity, measure


def test_at_four_times_capacity_most_of_the_capacity_is_answered_in_time() -> None:
    found = measure(4.0, 45.0)
    assert found.failures == []
    assert found.in_time_a_second >= 0.8 * capacity()
    # What was accepted is answered whole; of the others each was told at once, and few too late.
    assert all(a.whole + a.refused + a.late == 1 for a in found.answers)
    assert found.count(lambda a: a.late) <= 0.1 * found.count(lambda a: a.whole)


@pytest.mark.full
def test_no_load_gives_less_than_the_one_before_it() -> None:
    found = [measure(times, 600.0) for times in (0.5, 1.0, 2.0, 4.0)]
    assert [one.failures for one in found] == [[]] * 4
    for before, after in itertools.pairwise(found):
        assert after.in_time_a_second >= 0.95 * before.in_time_a_second
    assert found[-1].in_time_a_second >= 0.8 * capacity()
    for one in found:
        assert all(a.whole + a.refused + a.late == 1 for a in one.answers)


def test_without_a_time_that_they_allow_all_are_answered() -> None:
    found = measure(2.0, 30.0, first_token_timeout_s=0)
    assert found.failures == []
    assert all(a.whole for a in found.answers)
