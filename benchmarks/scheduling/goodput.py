"""Answers in time when more is asked than can be done: the whole system in virtual time, at several loads.

Services, queue scripts and the scheduler's core are the real ones; decoder and network are simulated, and so is time.
"""

import argparse

from tests.simulation.goodput import EACH_TOKEN_S, FIRST_TOKEN_S, capacity, table


def main(arguments: list[str]) -> int:
    """Prints a line for each load: without and with a goal for first tokens, and with a time that requests allow."""
    parser = argparse.ArgumentParser(prog="goodput", description=__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual ones")
    parser.add_argument(
        "--first-token-goal",
        type=float,
        nargs="+",
        default=[0.0, FIRST_TOKEN_S],
        help="the scheduler's option; 0 is in order of arrival",
    )
    parser.add_argument(
        "--first-token-timeout",
        type=float,
        nargs="+",
        default=[0.0, FIRST_TOKEN_S],
        help="seconds that each request allows; 0 is any time",
    )
    told = parser.parse_args(arguments)
    print(
        f"capacity {capacity():.3f} requests/s; in time: the first token within {FIRST_TOKEN_S:g} s, "
        f"then {EACH_TOKEN_S:g} s a token"
    )
    for timeout in told.first_token_timeout:
        # Requests that allow a time are served in order of arrival whatever the goal.
        for goal in told.first_token_goal if not timeout else told.first_token_goal[:1]:
            print(f"first token timeout {timeout:g} s, goal {goal:g} s")
            options = {"first_token_timeout_s": timeout, "first_token_goal_s": goal}
            for load in told.loads:
                print(table(load, told.seconds, **options), flush=True)
    return 0
