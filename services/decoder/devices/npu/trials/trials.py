"""Forms are tried in processes of their own: after a fault on the device every later call of a process fails."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch

from services.decoder.devices.npu.forms import Asked, Form, Trial
from services.decoder.devices.npu.trials.kept_trials import KeptTrials
from shared.child_process.die_with_parent import die_with_parent
from shared.settings import child_environment, python_path

log = structlog.get_logger(__name__)

_ROOT = Path(__file__).parents[5]
_LONGEST_S = 300.0  # of a trial; a kernel may be compiled before its first call

Attempt = tuple[Asked, Form]


class Operators(Protocol):
    """What forms are tried by, such as `NpuOps`."""

    name: str
    dtype: torch.dtype
    block_size: int

    def try_form(self, asked: Asked, form: Form) -> Trial:
        """In this process."""


class NoTrials(Exception):
    """No process of its own reaches the device; the text says why."""


def kept_or_tried(ops: Operators, asked: Asked, forms: Sequence[Form]) -> Iterator[Trial]:
    """Of each form, in this order, what was found at an earlier start; else it is tried, and that is kept."""
    kept = KeptTrials(ops.name, str(ops.dtype), ops.block_size, asked)
    known = kept.read(forms)
    tried = apart_or_here(ops, [(asked, form) for form in forms if form not in known])
    for form in forms:
        if form not in known:
            known[form] = next(tried)
            kept.write(known.values())
        yield known[form]


def apart_or_here(ops: Operators, attempts: Sequence[Attempt]) -> Iterator[Trial]:
    """Tries them `apart`, and in this process where no other one may use the device."""
    left = list(attempts)
    try:
        for trial in apart(ops, attempts):
            left.pop(0)
            yield trial
    except NoTrials as error:
        log.warning("forms are tried in this process", reason=str(error))
        yield from here(ops, left)


def here(ops: Operators, attempts: Sequence[Attempt]) -> Iterator[Trial]:
    """Tries them in this process."""
    for asked, form in attempts:
        yield ops.try_form(asked, form)


def apart(ops: Operators, attempts: Sequence[Attempt]) -> Iterator[Trial]:
    """Tries them in this order. What comes behind one that leaves its process useless, or ends it, is tried in a new
    one. Raises NoTrials."""
    left = list(attempts)
    while left:
        process = _Process(ops, left)
        try:
            for said in process.answers():
                _, form = left.pop(0)
                yield trial_from(form, said)
        finally:
            process.end()
        if not process.is_ready:
            raise NoTrials(process.ending)
        if left and not process.is_spent:
            _, form = left.pop(0)
            yield Trial(form, math.inf, False, process.ending)


def to_json(trial: Trial) -> dict[str, Any]:
    """Without its form."""
    error = trial.error if math.isfinite(trial.error) else None
    return {"error": error, "agrees": trial.agrees, "refusal": trial.refusal}


def trial_from(form: Form, said: dict[str, Any]) -> Trial:
    """The opposite of `to_json`."""
    error = math.inf if said["error"] is None else float(said["error"])
    return Trial(form, error, bool(said["agrees"]), str(said["refusal"]))


class _Process:
    """One that tries forms, and says of each what came of it."""

    def __init__(self, ops: Operators, attempts: Sequence[Attempt]) -> None:
        self.is_ready = False  # it has reached the device
        self.is_spent = False  # it has said that it cannot go on
        self._last = ""
        self._is_late = False
        request = {
            "dtype": str(ops.dtype).removeprefix("torch."),
            "attempts": [
                [type(asked).__name__, vars(asked), vars(form)] for asked, form in attempts
            ],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.trial_program", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=child_environment(
                PYTHONPATH=python_path(_ROOT, _ROOT / "protos"), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
            ),
            preexec_fn=die_with_parent(),
        )

    def answers(self) -> Iterator[dict[str, Any]]:
        """Of each attempt in turn, until it ends."""
        assert self._process.stdout is not None
        while line := self._next_line():
            said = _read(line)
            if said is None:  # of a library
                self._last = line.strip() or self._last
            elif "agrees" in said:
                yield said
            else:
                self.is_ready = True
                self.is_spent = bool(said.get("spent"))
        self._process.wait()

    @property
    def ending(self) -> str:
        """How it came to its end."""
        if self._is_late:
            return f"no answer within {_LONGEST_S:.0f} seconds"
        return f"its process ended with status {self._process.returncode}: {self._last}"

    def end(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _next_line(self) -> str:
        timer = threading.Timer(_LONGEST_S, self._give_up)
        timer.start()
        assert self._process.stdout is not None
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()


def _read(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and {"agrees", "ready", "spent"} & said.keys() else None
