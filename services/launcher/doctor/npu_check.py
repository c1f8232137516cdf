"""`tessera doctor --npu`: every operation of the NPU against the CPU's, as a table.

Decoder and vision encoder have a check each (`devices/npu/check.py`), in a process of its own: a kernel that fails may
end it. It prints a JSON object for each operation (`shared/hardware/operation_check.py`): `name`, `ok`, `error` (the
largest difference), `us` (microseconds a call), `gb_s` and `detail`; all but the first two may be null.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.settings import child_environment, python_path

_ROOT = Path(__file__).parents[3]
_COMMANDS = tuple(
    (sys.executable, "-P", "-m", f"services.{service}.devices.npu.check")
    for service in ("decoder", "vision_encoder")
)
_LAST_LINES = 5
_NAME_WIDTH = 52


def run(commands: Sequence[Sequence[str]] = _COMMANDS) -> int:
    """Prints a row for each operation. Returns 1 if one is wrong, a check tries none, or ends early; else 0."""
    print(f"\n{'':<8} {'operation':<{_NAME_WIDTH}} {'error':>9} {'us':>9} {'GB/s':>8}")
    checks = [_Check(command) for command in commands]
    tried, wrong = sum(check.tried for check in checks), sum(check.wrong for check in checks)
    print(f"\n{tried - wrong} of {tried} operations are right.")
    for check in checks:
        if check.status and not check.wrong:
            print(f"A check did not come to its end: status {check.status}.")
    return int(any(check.wrong or check.status or not check.tried for check in checks))


class _Check:
    """Runs one, and prints its rows as they come."""

    def __init__(self, command: Sequence[str]) -> None:
        self.tried = self.wrong = 0
        others: list[str] = []
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=child_environment(
                PYTHONPATH=python_path(_ROOT, _ROOT / "protos"),
                TORCH_DEVICE_BACKEND_AUTOLOAD="0",
            ),
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if (result := _result(line)) is None:
                    others = [*others, line.rstrip()][-_LAST_LINES:]
                    continue
                self.tried += 1
                self.wrong += not result["ok"]
                print(_row(result), flush=True)
        self.status = process.returncode
        if self.status or not self.tried:
            print("\n".join(f"{'':<8} {line}" for line in others))


def _result(line: str) -> dict[str, Any] | None:
    """One operation; None for a line of a library."""
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) and {"name", "ok"} <= result.keys() else None


def _row(result: dict[str, Any]) -> str:
    mark = "ok" if result["ok"] else "wrong"
    row = f"{mark:<8} {result['name']:<{_NAME_WIDTH}} " + " ".join(
        _number(result.get(name), width) for name, width in (("error", 9), ("us", 9), ("gb_s", 8))
    )
    detail = result.get("detail")
    return f"{row}  {detail}" if detail else row


def _number(value: Any, width: int) -> str:
    if not isinstance(value, int | float):
        return f"{value or '':>{width}}"
    return f"{value:>{width}.3g}" if abs(value) < 1000 else f"{value:>{width}.0f}"
