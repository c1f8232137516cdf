"""The comparison of a checkpoint with its own class in a small random model (`services/comparison`), from outside.

It runs in a process of its own: it needs torch, every part of the model at once, and whatever the class does to the
process that it is in. It takes ten seconds of processor time or more, and less than 3 GB of memory for a while. What it
has found of the same files by the same code is not asked again (`verdicts.py`).
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from services.families import registry
from services.families.family import is_generic
from services.families.generic import is_listed
from services.families.verdicts import Verdict, Verdicts
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.child_process.answer_file import AnswerFile
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend

_MOST_S = 900.0
_MISSING = "MISSING_PACKAGE"
_ROOT = Path(__file__).parents[2]


def has_comparison(checkpoint: Checkpoint, backend: ModelBackend) -> bool:
    """Whether a part of it runs by the code of transformers, and there is a class for the whole to compare it with."""
    family = registry.find(checkpoint)
    decoder = registry.find_decoder(checkpoint, backend).decoder
    if not any(map(is_generic, (family.prompt, family.encoder, decoder))):
        return False
    brings_class = "auto_map" in checkpoint.config and not family.takes_media
    # DeepSeek-VL2's released folders name no class.
    names_class = bool(checkpoint.config.get("architectures"))
    return brings_class or (names_class and is_listed(checkpoint.architecture))


def compares_pictures(checkpoint: Checkpoint, backend: ModelBackend) -> bool:
    """Whether prompts with pictures are compared too."""
    return registry.find(checkpoint).takes_media and has_comparison(checkpoint, backend)


class Comparison:
    """A comparison that runs from `with` on, beside what else there is to do.

    `was_known`: an earlier one of the same files has found what this one would, and it does not run.
    """

    def __init__(
        self, checkpoint: Checkpoint, backend: ModelBackend, trust_remote_code: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._command = [
            *(sys.executable, "-m", "services.comparison"),
            *("--family", checkpoint.family, "--model-backend", backend),
            *(["--trust-remote-code"] if trust_remote_code else []),
        ]
        self._verdicts = Verdicts(checkpoint, backend, str(trust_remote_code))
        self._folder = str(checkpoint.folder.absolute())
        self._process: subprocess.Popen[str] | None = None
        self._answer: AnswerFile | None = None
        self._known = self._verdicts.read()
        self.was_known = self._known is not None

    def __enter__(self) -> Self:
        if self._known is None:
            self._answer = AnswerFile()
            self._process = subprocess.Popen(
                [*self._command, self._folder, str(self._answer.number)],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=self._answer.pass_fds,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._answer is not None:
            self._answer.close()

    def require_equal(self) -> None:
        """Waits for its end. Raises InvalidRequest with the reason for a checkpoint that cannot be served."""
        if self._known is None:
            self._known = self._wait()
            # A package that is missing may be installed where no list of packages says it.
            if self._known.reason != _MISSING:
                self._verdicts.write(self._known)
        if self._known.reason:
            raise InvalidRequest(self._known.reason, self._known.message, field="model")

    def _wait(self) -> Verdict:
        """Raises InvalidRequest where it does not end as it should."""
        assert self._process is not None and self._answer is not None
        try:
            errors = self._process.communicate(timeout=_MOST_S)[1]
        except subprocess.TimeoutExpired:
            raise self._unfinished(f"takes longer than {_MOST_S:.0f} s") from None
        if said := self._answer.read():
            return Verdict(**json.loads(said))
        if self._process.returncode:
            last = errors.strip().splitlines()[-1:] or [f"status {self._process.returncode}"]
            raise self._unfinished(f"ended early: {last[0]}")
        return Verdict()

    def _unfinished(self, why: str) -> InvalidRequest:
        return unsupported(
            self._checkpoint,
            f"the comparison with its own class {why}. --skip-model-check serves it without that",
        )
