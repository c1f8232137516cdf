"""`tessera bench kill`: how it counts, and that a system whose every service is killed loses nothing."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.kill.poison import Poisoned
from benchmarks.kill.report import judge
from benchmarks.kill.requests import draw_requests, shares
from benchmarks.kill.run import Outcome
from benchmarks.kill.settings import KillSettings
from benchmarks.kill.target import Strike
from benchmarks.kill.transcript import Choice, Transcript
from benchmarks.kill.victims import Victim, order_of_kills
from services.launcher import cli
from shared.client import Event

SETTINGS = KillSettings()


def event(place: str, at: float = 0.0, ending: str | None = None, **ids: list[int]) -> Event:
    """One with tokens of choices, such as c0=[1, 2]."""
    choices = [
        {"index": int(name[1:]), "text": f"<{i}>", "token_ids": i, "finish_reason": ending}
        for name, i in ids.items()
    ]
    return Event(f"r_ab/{place}", {"choices": choices}, at)


def usage(tokens: int) -> Event:
    return Event("r_ab/9e", {"choices": [], "usage": {"completion_tokens": tokens}}, 0.0)


def transcript(*events: Event, choices: int = 1) -> Transcript:
    told = Transcript(0.0, [Choice() for _ in range(choices)])
    for one in events:
        told.take(one)
    told.end(9.0)
    return told


def test_a_whole_stream_has_nothing_lost_or_doubled() -> None:
    told = transcript(
        event("h1"),
        event("1.0", c0=[5]),
        event("1.2", c1=[6, 7]),
        event("2e.2", c0=[8], ending="length"),
        event("2e.2e", c1=[], ending="stop"),
        usage(4),
        choices=2,
    )
    assert (told.lost, told.doubled, told.error) == (0, 0, "")
    assert [choice.tokens for choice in told.choices] == [[5, 8], [6, 7]]


def test_a_token_that_is_missing_is_counted_once() -> None:
    told = transcript(
        event("1", c0=[5]), event("4", c0=[8]), event("5e", c0=[9], ending="length"), usage(5)
    )
    assert (told.lost, told.doubled) == (2, 0)


def test_a_token_that_comes_twice_is_counted_once() -> None:
    told = transcript(
        event("1", c0=[5]), event("1", c0=[5]), event("2e", c0=[6], ending="length"), usage(2)
    )
    assert (told.lost, told.doubled) == (0, 1)


def test_tokens_missing_at_the_end_are_seen_by_usage() -> None:
    told = transcript(event("2e", c0=[5, 6], ending="length"), usage(3))
    assert told.lost == 1


def test_every_choice_ends_exactly_once() -> None:
    assert "ended [0] times" in transcript(event("1", c0=[5])).error
    ends = event("1e", c0=[], ending="length")
    assert "ended [2] times" in transcript(event("1", c0=[5]), ends, ends).error


def test_reasoning_and_calls_are_text_that_is_compared() -> None:
    def told(arguments: str) -> Transcript:
        function = {"name": "paint", "arguments": arguments}
        delta = {
            "reasoning": "hm",
            "tool_calls": [{"index": 0, "id": "call_r_1", "function": function}],
        }
        choice = {"index": 0, "delta": delta, "token_ids": [5], "finish_reason": "length"}
        return transcript(Event("r_ab/1e", {"choices": [choice]}, 0.0), usage(1))

    assert told("{}").choices[0].text == "hmpaint{}"
    assert told("{}").equals(told("{}")) and not told("{}").equals(told("{ }"))


def test_gaps_are_of_streams_that_were_being_read() -> None:
    times = [event(str(n), at, c0=[n]) for n, at in ((1, 1.0), (2, 1.1), (3, 4.0), (4, 4.1))]
    told = transcript(*times, event("4e", 4.2, c0=[], ending="length"))
    assert told.gap_at(1.05, 10.0) == pytest.approx(2.9)
    assert told.gap_at(1.05, 1.06) == pytest.approx(0.1)  # the later one is the next kill's
    assert told.gap_at(0.5, 10.0) is None
    assert told.gap_at(5.0, 10.0) is None
    assert told.wait_at(0.25) == pytest.approx(0.75)
    assert told.wait_at(1.5) is None


def test_a_run_fails_for_what_is_lost_different_or_too_slow() -> None:
    def of(*tokens: int, gap: float = 0.1) -> Transcript:
        events = [event(str(n + 1), gap * n, c0=[t]) for n, t in enumerate(tokens)]
        end = event(f"{len(tokens)}e", c0=[], ending="length")
        return transcript(*events, end, usage(len(tokens)))

    failed = of(1, 2, 3)
    failed.error = "GaveUp: nobody answers"
    outcome = Outcome(
        [],
        [of(1, 2, 3) for _ in range(3)],
        [of(1, 2, 3, gap=6.0), of(1, 2, 4), failed],
        [Strike(Victim.parse("decoder"), ["decoder"], at=0.05)],
    )
    outcome.strikes[0].bystanders.append("gateway-1")
    verdict = judge(outcome)
    assert (verdict.requests, verdict.completed, verdict.failed, verdict.equal) == (3, 2, 1, 1)
    assert verdict.victims["decoder"].gap_p99 == pytest.approx(6.0, abs=0.3)
    assert len(verdict.problems(SETTINGS)) == 3
    assert "gateway-1" in verdict.problems(SETTINGS)[2]
    relaxed = SETTINGS.model_copy(update={"expect_equal": False, "most_gap": 5.0})
    problems = verdict.problems(relaxed)
    assert len(problems) == 3 and "decoder" in problems[1]


def test_a_poison_request_has_to_end_alone() -> None:
    def of(*tokens: int) -> Transcript:
        end = event(f"{len(tokens)}e", c0=list(tokens), ending="length")
        return transcript(end, usage(len(tokens)))

    harmed = of(1, 2)
    harmed.error = "Failed: poisoned"
    told = "3 decoders were lost while they ran this request, the last one alone"
    right = Poisoned(
        4, 500, told, lost_decoders=2, after_first_kill=1, beside=[(of(1, 2), of(1, 2))]
    )
    assert right.problems(SETTINGS) == []
    for change, problem in (
        ({"status": 200, "error": ""}, "was told"),
        ({"error": "the step failed"}, "was told"),
        ({"lost_decoders": 3}, "with lost decoder 4"),
        ({"after_first_kill": 2}, "after one kill"),
        ({"beside": [(of(1, 2), harmed)]}, "were harmed"),
        ({"beside": [(of(1, 2), of(1, 3))]}, "differ"),
    ):
        (found,) = replace(right, **change).problems(SETTINGS)
        assert problem in found


def test_victims_are_read_as_users_write_them() -> None:
    one, two, three, four = Victim.parse_all("encoder, decoder:stop,decoder+scheduler,redis:term")
    assert (one.services, one.how, one.freezes) == (("vision_encoder",), "kill", False)
    assert (two.services, two.freezes) == (("decoder",), True)
    assert (four.services, four.how) == (("redis",), "term")
    assert three.services == ("decoder", "scheduler")
    full, load = Victim.parse_all("decoder:full-disk,burst")
    assert full.needs_full_disk and full.services == ("decoder",)
    assert (load.services, load.overload, full.overload) == ((), "burst", "")
    kills = order_of_kills([one, two], times=3, seed=1)
    assert sorted(kill.text for kill in kills) == ["decoder:stop"] * 3 + ["encoder"] * 3
    assert kills == order_of_kills([one, two], times=3, seed=1)
    assert 0 <= one.moment(Random(1), 100.0) <= 0.5


@pytest.mark.parametrize(
    "asked", ["kitchen", "decoder:sleep", "burst:stop", "decoder+burst", "decoder+", ""]
)
def test_an_unknown_victim_is_a_usage_error(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        cli.run(["bench", "--kill", asked])
    assert status.value.code == 2
    assert "--victims" in capsys.readouterr().err


def test_equal_seeds_draw_equal_requests_with_everything_in_them() -> None:
    requests = draw_requests(KillSettings(num_requests=40), "m")
    assert requests == draw_requests(KillSettings(num_requests=40), "m")
    assert requests != draw_requests(KillSettings(num_requests=40, seed=1), "m")
    pictures = sum("image_url" in json.dumps(r.body) for r in requests)
    assert 10 < pictures < 30
    assert 2 < sum(r.choices == 2 for r in requests) < 20
    assert {r.body["user"] for r in requests} == {"kill-0", "kill-1", "kill-2"}
    assert 2 < sum("response_format" in r.body for r in requests) < 20
    assert not any("tools" in r.body for r in requests)
    calling = draw_requests(KillSettings(num_requests=40), "m", calls=True)
    assert 2 < sum("tools" in r.body for r in calling) < 20
    # A form decides where an answer ends.
    assert not any(
        r.body["ignore_eos"] for r in calling if r.body.keys() & {"tools", "response_format"}
    )
    parts = shares(requests, 7)
    assert [r for part in parts for r in part] == requests
    assert {len(part) for part in parts} == {5, 6}


def test_a_system_that_does_not_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "kill", "--state-dir", str(tmp_path)]) == 1
    assert "no `tessera serve` runs" in capsys.readouterr().err
