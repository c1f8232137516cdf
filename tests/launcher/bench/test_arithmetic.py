"""What a run's timestamps make: latencies, percentiles, goodput, arrival times."""

import math
from array import array
from itertools import pairwise
from statistics import mean

import pytest

from benchmarks.load.event_reader import EventReader
from benchmarks.load.load import Pacing
from benchmarks.load.objective import Objective
from benchmarks.load.recording import Recording
from benchmarks.load.report import table
from benchmarks.load.result import summarise


def recording(
    *times: float, sent: float = 100.0, counts: tuple[int, ...] = (), error: str = ""
) -> Recording:
    """Events at seconds after sending, one token each unless `counts` says otherwise."""
    counts = counts or (1,) * len(times)
    return Recording(
        sent=sent,
        ended=sent + (times[-1] if times else 0.0) + 0.5,
        times=array("d", [sent + t for t in times]),
        counts=array("q", counts),
        prompt_tokens=10,
        output_tokens=sum(counts),
        error=error,
    )


def test_latencies_of_one_request() -> None:
    one = recording(0.5, 0.6, 0.8, 1.1)
    assert one.ttft == pytest.approx(0.5)
    assert one.e2el == pytest.approx(1.6)
    assert one.tpot == pytest.approx(0.2)
    assert one.gaps == pytest.approx([0.1, 0.2, 0.3])
    assert one.itl == pytest.approx([0.1, 0.2, 0.3])


def test_several_tokens_in_an_event_are_several_tokens() -> None:
    one = recording(1.0, 1.4, 2.0, counts=(2, 4, 1))
    assert one.output_tokens == 7
    assert one.itl == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.6])
    assert one.gaps == pytest.approx([0.4, 0.6])
    assert one.tpot == pytest.approx(1.0 / 6)


def test_one_token_has_no_time_per_token() -> None:
    result = summarise([recording(0.25)], 1.0)
    assert result.latencies["ttft"].mean == pytest.approx(0.25)
    assert math.isnan(result.latencies["tpot"].mean)
    assert result.to_json()["mean_tpot_ms"] is None
    assert " -" in table(result)


def test_percentiles_are_interpolated() -> None:
    # 0.01 .. 1.00: ranks lie at 0.99 * p between the first and the last.
    result = summarise([recording(n / 100) for n in range(1, 101)], 10.0)
    ttft = result.latencies["ttft"]
    assert ttft.mean == pytest.approx(0.505)
    assert ttft.median == pytest.approx(0.505)
    assert ttft.percentiles[90] == pytest.approx(0.901)
    assert ttft.percentiles[99] == pytest.approx(0.9901)
    assert result.to_json()["p99_ttft_ms"] == pytest.approx(990.1)


def test_rates_count_what_succeeded() -> None:
    runs = [recording(0.1, 0.2), recording(0.1, 0.3), recording(error="gone")]
    result = summarise(runs, 2.0)
    assert (result.completed, result.failed) == (2, 1)
    assert result.requests_per_s == 1.0
    assert result.output_tokens_per_s == 2.0
    assert result.total_tokens_per_s == 12.0
    assert result.goodput_per_s is None
    assert "1 x gone" in table(result)


def test_goodput_needs_every_objective() -> None:
    runs = [
        recording(0.5, 0.55),  # both kept, the first at its limit exactly
        recording(0.4, 0.46),  # too slow between tokens
        recording(0.6, 0.61),  # too slow to the first
        recording(error="gone"),
    ]
    objectives = [Objective.parse("ttft:500"), Objective.parse("tpot:55")]
    runs[0].sent, runs[0].ended, runs[0].times = 0.0, 1.05, array("d", [0.5, 0.55])
    result = summarise(runs, 2.0, objectives)
    assert result.good == 1
    assert result.goodput_per_s == 0.5
    assert "25.0% of all" in table(result)
    assert summarise(runs, 2.0, [Objective.parse("itl:12")]).good == 1
    assert summarise(runs, 2.0, [Objective.parse("e2el:1060")]).good == 2


@pytest.mark.parametrize("text", ["speed:5", "ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1"])
def test_an_objective_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ttft"):
        Objective.parse(text)


def test_arrivals_follow_the_rate() -> None:
    assert Pacing().delays(3, 0) == [0, 0, 0]
    assert Pacing(rate=4, is_constant=True).delays(4, 0) == [0, 0.25, 0.5, 0.75]
    for burstiness in (0.5, 1.0, 4.0):
        pacing = Pacing(rate=50, burstiness=burstiness)
        delays = pacing.delays(20_001, 7)
        assert delays == pacing.delays(20_001, 7) != pacing.delays(20_001, 8)
        gaps = [b - a for a, b in pairwise(delays)]
        assert mean(gaps) == pytest.approx(1 / 50, rel=0.05)
        # A gamma distribution's variance is mean^2 / shape.
        variance = mean((gap - 1 / 50) ** 2 for gap in gaps)
        assert variance == pytest.approx(1 / 50**2 / burstiness, rel=0.15)


def counts_of(*pieces: bytes) -> list[int]:
    reader = EventReader()
    for piece in pieces:
        reader.feed(piece)
    return list(reader.counts)


def test_tokens_are_counted_by_ids_else_by_events_with_text() -> None:
    ids = b'data: {"choices":[{"text":"","token_ids":[5, 6]}]}\n\n'
    text = b'data: {"choices":[{"delta":{"content": "a"}}]}\n\n'
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    prompt = b'data: {"choices":[{"text":"","token_ids":[]}],"prompt_token_ids":[1,2,3]}\n\n'
    assert counts_of(ids, ids) == [2, 2]
    assert counts_of(role, text, text) == [1, 1]
    assert counts_of(prompt, ids) == [2]
    assert counts_of(text + text) == [2]  # two events that came together
    assert counts_of(b": ping\n\n", b"data: [DONE]\n\n") == []
    # The words of the format inside generated text change nothing.
    tricky = b'data: {"choices":[{"text":"\\"token_ids\\":[1,2,3] \\"content\\":\\"x","token_ids":[9]}]}\n\n'
    assert counts_of(tricky) == [1]


def test_events_may_be_cut_anywhere() -> None:
    stream = (
        b'data: {"choices":[{"text":"a","token_ids":[1]}]}\r\n\r\n'
        b'data: {"choices":[{"text":"b","token_ids":[2,3]}]}\r\n\r\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\r\n\r\n'
        b"data: [DONE]\r\n\r\n"
    )
    for size in (1, 2, 7, 50, len(stream)):
        reader = EventReader()
        for start in range(0, len(stream), size):
            reader.feed(stream[start : start + size])
        assert sum(reader.counts) == 3
        assert reader.usage() == {"prompt_tokens": 4, "completion_tokens": 3}


def test_an_error_in_the_stream_is_found() -> None:
    reader = EventReader()
    reader.feed(
        b'data: {"choices":[{"text":"a"}]}\n\ndata: {"error":{"message":"decoder lost"}}\n\n'
    )
    assert reader.error() == "decoder lost"
