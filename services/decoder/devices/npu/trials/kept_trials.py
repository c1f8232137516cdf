"""What trials have found, kept in files, so that a form is tried once and not at every start.

A file's name is a digest of all that a trial depends on: chip, CANN, NNAL, torch, torch_npu, the code here, and what is
tried. A file that cannot be read or written is none: the trial runs again.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch_npu

from services.decoder.devices.npu.errors import find_cause
from services.decoder.devices.npu.forms import Asked, Form, Trial
from shared.hardware.ascend import installation, npu_name
from shared.settings import cache_home

_DIGEST_BYTES = 16
# What may be otherwise the next time.
_PASSING = ("NPU_OUT_OF_MEMORY", "NPU_LOST", "NPU_LIBRARIES_MISSING")


@dataclass(frozen=True)
class KeptTrials:
    """Of what was asked for once. Safe for several processes at once."""

    ops: str
    dtype: str
    block_size: int
    asked: Asked

    def read(self, forms: Sequence[Form]) -> dict[Form, Trial]:
        """Of those forms that were tried before."""
        try:
            said = json.loads(self._file().read_text(encoding="utf-8"))["trials"]
            known = {form.name: form for form in forms}
            return {
                known[each["form"]]: Trial(
                    known[each["form"]],
                    float(each["error"]),
                    bool(each["agrees"]),
                    str(each["refusal"]),
                )
                for each in said
                if each["form"] in known
            }
        except (OSError, RuntimeError, ValueError, TypeError, KeyError):
            return {}

    def write(self, trials: Iterable[Trial]) -> None:
        """Keeps all but what may be otherwise the next time."""
        lasting = [
            {
                "form": trial.form.name,
                "error": str(trial.error),
                "agrees": trial.agrees,
                "refusal": trial.refusal,
            }
            for trial in trials
            if not _is_passing(trial)
        ]
        with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
            file = self._file()
            file.parent.mkdir(parents=True, exist_ok=True)
            _replace(file, json.dumps({"asked": str(self), "trials": lasting}))

    def _file(self) -> Path:
        return place_of(str(self)).with_suffix(".json")


def place_of(what: str) -> Path:
    """The path, without a suffix, of what is kept of something here. Raises RuntimeError where there is no home."""
    own = Path(__file__).parent
    parts = [
        what,
        npu_name(),
        torch.__version__,
        torch_npu.__version__,
        *installation(),
        *(path.read_text(encoding="utf-8") for path in sorted(own.glob("*.py"))),
    ]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(hashlib.blake2b(part.encode(), digest_size=_DIGEST_BYTES).digest())
    return cache_home() / "tessera" / "npu-forms" / digest.hexdigest()


def _is_passing(trial: Trial) -> bool:
    cause = find_cause(RuntimeError(trial.refusal)) if trial.refusal else None
    return cause is not None and cause.reason in _PASSING


def _replace(file: Path, text: str) -> None:
    """Readers find the old content or the new one."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    with os.fdopen(descriptor, "w", encoding="utf-8") as made:
        made.write(text)
    Path(name).replace(file)
