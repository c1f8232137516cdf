"""The kept log files of a system, what is found in them, and the waterfall of `tessera why`."""

import stat
from pathlib import Path
from typing import Any

import pytest

from services.launcher import logs, why
from services.launcher.settings import WhySettings
from services.launcher.state.log_files import LogFiles, lines_about
from tests.support.network.ports import free_ports

RID = f"r_00000000_{7:032x}"
LINE = f"10:00:00.000001 [info     ] request ended                    request_id={RID} finish=stop"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "logs"


def test_lines_of_a_request_come_with_their_tracebacks_from_all_processes(folder: Path) -> None:
    with LogFiles(folder) as files:
        files.write("gateway", f"10:00:00.0 [info     ] admitted   request_id={RID}")
        files.write("gateway", f"10:00:00.1 [info     ] admitted   request_id={RID}0")
        files.write("decoder-1", f"10:00:00.2 [error    ] a step failed request_id={RID}")
        files.write("decoder-1", "Traceback (most recent call last):")
        files.write("decoder-1", "  its frames")
        files.write("decoder-1", "10:00:00.3 [info     ] another event")
        files.write("scheduler", f'{{"event": "ended", "request_id": "{RID}"}}')
    found = [(line.process, line.text.split()[-1]) for line in lines_about(folder, RID)]
    assert sorted(found) == [
        ("decoder-1", "frames"),
        ("decoder-1", "last):"),
        ("decoder-1", f"request_id={RID}"),
        ("gateway", f"request_id={RID}"),
        ("scheduler", f'"{RID}"}}'),
    ]
    assert stat.S_IMODE((folder / "gateway.log").stat().st_mode) == 0o600


def test_files_have_a_size_and_one_before_them(folder: Path) -> None:
    with LogFiles(folder, most_bytes=2_000) as files:
        for number in range(100):
            files.write("gateway", f"10:00:00.0 [info     ] line {number:03} request_id={RID}")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes.keys() == {"gateway.log", "gateway.log.1"} and sum(sizes.values()) < 4_400
    numbers = [int(line.text.split()[4]) for line in lines_about(folder, RID)]
    assert numbers == list(range(numbers[0], 100)) and len(numbers) > 20


def test_a_folder_that_cannot_be_written_costs_the_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with LogFiles(tmp_path / "file" / "logs") as files:
        files.write("gateway", "a line")


def test_why_tells_a_request_that_ended_long_ago_from_an_unknown_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LogFiles(folder):
        pass
    (folder / "gateway.log").write_text(f"2020-01-01T10:00:00.000Z {LINE}\n")
    [line] = logs.lines_of_all([folder], RID)
    assert (line.at, line.process) == ("2020-01-01T10:00:00.000Z", "gateway")
    settings = WhySettings(request_id=RID, state_dir=folder.parent)
    assert "ended more than ten minutes ago" in why._explain(settings)
    other = settings.model_copy(update={"request_id": RID[:-1] + "8"})
    assert "is unknown" in why._explain(other)
    [port] = free_ports(1)
    assert why.main([RID, "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "127.0.0.1" in capsys.readouterr().err


def test_a_waterfall_marks_the_largest_part() -> None:
    def span(name: str, start_ms: float, duration_ms: float) -> dict[str, Any]:
        return {
            "name": name,
            "service": "decoder",
            "replica": "0123456789",
            "start_ms": start_ms,
            "duration_ms": duration_ms,
            "attributes": {},
        }

    timeline = {
        "request_id": RID,
        "model": "m",
        "started": 1_790_000_000.0,
        "duration_ms": 100.0,
        "text": "The request took 100.0 ms.",
        "largest": {"name": "decode", "share": 0.75},
        "spans": [span("prefill", 0, 25), span("decode", 25, 75), span("end", 100, 0)],
    }
    lines = list(why.waterfall(timeline, 80))
    assert lines[:2] == [f"{RID}  m  2026-09-21T14:13:20.000Z", "The request took 100.0 ms."]
    prefill, decode = (line for line in lines if "█" in line)
    assert prefill.startswith("prefill ") and decode.startswith("decode *")
    assert 2.5 < decode.count("█") / prefill.count("█") < 3.5
    assert "75%" in lines[-1] and max(map(len, lines[3:])) <= 80
