"""What is away is said to be so once, whoever notices and however often."""

import structlog
from structlog.testing import capture_logs

from shared.telemetry.outage import Outage


def test_an_outage_has_one_line_at_its_begin_and_one_at_its_end() -> None:
    with capture_logs() as lines:
        outage = Outage(structlog.get_logger(), "Redis is away", "Redis is back")
        outage.over("a")
        outage.note("refused", "a")
        outage.note("reset", "b")
        outage.note("refused", "a")
        outage.over("b")
        assert [line["event"] for line in lines] == ["Redis is away"]
        outage.over("a")
        outage.note("refused", "b")
    assert [(line["log_level"], line["event"], line.get("error")) for line in lines] == [
        ("warning", "Redis is away", "refused"),
        ("info", "Redis is back", None),
        ("warning", "Redis is away", "refused"),
    ]


def test_an_end_may_be_silent() -> None:
    with capture_logs() as lines:
        outage = Outage(structlog.get_logger(), "the lease is not renewed")
        outage.note("refused")
        outage.note("refused")
        outage.over()
    assert len(lines) == 1


def test_who_tries_no_more_does_not_keep_an_outage_going() -> None:
    with capture_logs() as lines:
        outage = Outage(structlog.get_logger(), "it is away", "it is back")
        outage.note("refused", by=1)
        outage.note("refused", by=2)
        outage.leave(by=1)
        outage.over(by=2)
        outage.note("refused", by=2)
    assert [line["event"] for line in lines] == ["it is away", "it is back", "it is away"]
