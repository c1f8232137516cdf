"""The comparison of a checkpoint with its own class in a small random model (`services/comparison`), from outside.

It runs in a process of its own: it needs torch, every part of the model at once, and whatever the class does to the
process that it is in. It takes ten seconds of processor time or more, and less than 3 GB of memory for a while.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from services.families import registry
from services.families.family import GENERIC_PROMPT, is_generic
from services.families.generic import is_listed
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend

_MOST_S = 900.0
_ROOT = Path(__file__).parents[2]


def has_comparison(checkpoint: Checkpoint, backend: ModelBackend) -> bool:
    """Whether a part of it runs by the code of transformers, and there is a class for the whole to compare it with."""
    generic = is_generic(registry.find_decoder(checkpoint, backend).decoder)
    if not generic and not compares_pictures(checkpoint):
        return False
    return "auto_map" in checkpoint.config or is_listed(checkpoint.architecture)


def compares_pictures(checkpoint: Checkpoint) -> bool:
    """Whether prompts with pictures are compared: those that the code of transformers writes."""
    return registry.find(checkpoint).prompt == GENERIC_PROMPT


class Comparison:
    """A comparison that runs from `with` on, beside what else there is to do."""

    def __init__(
        self, checkpoint: Checkpoint, backend: ModelBackend, trust_remote_code: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._command = [
            *(sys.executable, "-m", "services.comparison", str(checkpoint.folder.absolute())),
            *("--family", checkpoint.family, "--model-backend", backend),
            *(["--trust-remote-code"] if trust_remote_code else []),
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def require_equal(self) -> None:
        """Waits for its end. Raises InvalidRequest with the reason for a checkpoint that cannot be served."""
        try:
            said, errors = self._process.communicate(timeout=_MOST_S)
        except subprocess.TimeoutExpired:
            raise self._unfinished(f"takes longer than {_MOST_S:.0f} s") from None
        if said:
            refusal = json.loads(said)
            raise InvalidRequest(refusal["reason"], refusal["message"], field="model")
        if self._process.returncode:
            last = errors.strip().splitlines()[-1:] or [f"status {self._process.returncode}"]
            raise self._unfinished(f"ended early: {last[0]}")

    def _unfinished(self, why: str) -> InvalidRequest:
        return unsupported(
            self._checkpoint,
            f"the comparison with its own class {why}. --skip-model-check serves it without that",
        )
