"""Asking for more than a system can do must not make it do less: requests answered in time, at several loads."""

import itertools

import pytest

from tests.simulation.goodput import FIRST_TOKEN_S, Goodput, capacity, measure


def assert_all_served(found: Goodput) -> None:
    """Nothing is lost or refused, and the last answer comes when it would in any order: none waits for ever."""
    assert found.failures == []
    assert all(a.whole for a in found.answers)
    work_s = len(found.answers) / capacity()
    assert found.last_s <= max(found.seconds, 1.1 * work_s) + 2 * FIRST_TOKEN_S


def test_at_four_times_capacity_most_of_the_capacity_is_answered_in_time() -> None:
    found = measure(4.0, 30.0)
    assert_all_served(found)
    assert found.in_time_a_second >= 0.8 * capacity()


@pytest.mark.full
@pytest.mark.timeout(1800)  # an hour and a half of virtual time
def test_no_load_gives_less_than_the_one_before_it() -> None:
    found = [measure(times, 600.0) for times in (0.5, 1.0, 2.0)]
    for one in found:
        assert_all_served(one)
    found.append(measure(4.0, 600.0))
    # The queue holds 1,024 requests: beyond these some are refused, and told so at once.
    assert found[-1].failures == []
    assert all(a.whole + a.refused == 1 for a in found[-1].answers)
    for before, after in itertools.pairwise(found):
        assert after.in_time_a_second >= 0.95 * before.in_time_a_second
    assert found[-1].in_time_a_second >= 0.8 * capacity()


def test_without_a_goal_requests_are_begun_in_order_of_arrival() -> None:
    found = measure(2.0, 30.0, first_token_goal_s=0.0)
    assert_all_served(found)
    first = [a.came_s + a.first_s for a in found.answers]
    # Prompts of one step are told of one after the other.
    assert all(one < following + 0.01 for one, following in itertools.pairwise(first))


def test_requests_that_allow_a_time_are_refused_rather_than_late() -> None:
    found = measure(4.0, 45.0, first_token_timeout_s=FIRST_TOKEN_S)
    assert found.failures == []
    assert found.in_time_a_second >= 0.8 * capacity()
    # What was accepted is answered whole; of the others each was told at once, and few too late.
    assert all(a.whole + a.refused + a.late == 1 for a in found.answers)
    assert found.count(lambda a: a.late) <= 0.1 * found.count(lambda a: a.whole)
