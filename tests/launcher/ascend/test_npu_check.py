"""The table of `tessera doctor --npu`, from what the check prints."""

import json
import sys

import pytest

from services.launcher.doctor import npu_check

RIGHT = {
    "name": "rms_norm float16 [7, 896]",
    "ok": True,
    "error": 0.0005,
    "us": 12.3,
    "gb_s": 410.0,
}
WRONG = {
    "name": "attention window",
    "ok": False,
    "error": 1.5,
    "detail": "keys past 512 are ignored",
}


def program(*lines: object, status: int = 0) -> list[str]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    text = f"import sys; print(*{texts!r}, sep='\\n'); sys.exit({status})"
    return [sys.executable, "-c", text]


def check(*lines: object, status: int = 0) -> int:
    return npu_check.run([program(*lines, status=status)])


def test_all_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("[INFO] of a library", RIGHT, RIGHT) == 0
    printed = capsys.readouterr().out
    assert printed.count("ok       rms_norm float16 [7, 896]") == 2
    assert "0.0005      12.3      410" in printed
    assert "2 of 2 operations are right." in printed
    assert "of a library" not in printed


def test_a_wrong_operation_fails_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(RIGHT, WRONG, status=1) == 1
    printed = capsys.readouterr().out
    assert "wrong    attention window" in printed
    assert "keys past 512 are ignored" in printed
    assert "1 of 2 operations are right." in printed
    assert "did not come to its end" not in printed


@pytest.mark.parametrize("status", [0, 139])
def test_a_check_that_tries_nothing_or_crashes_fails(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["ImportError: libhccl.so: cannot open shared object file"]
    assert check(*lines, *([RIGHT] if status else []), status=status) == 1
    printed = capsys.readouterr().out
    assert "libhccl.so: cannot open" in printed
    assert ("did not come to its end: status 139" in printed) == bool(status)


def test_each_check_has_to_try_something_and_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert npu_check.run([program(RIGHT), program(RIGHT)]) == 0
    assert npu_check.run([program(RIGHT), program("no module named torch_npu")]) == 1
    assert npu_check.run([program(RIGHT, status=139), program(WRONG, status=1)]) == 1
    printed = capsys.readouterr().out
    assert "2 of 2 operations are right." in printed
    assert "no module named torch_npu" in printed
    assert printed.count("did not come to its end: status 139") == 1
