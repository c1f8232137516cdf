"""Forms in which an operator may be called: documents, releases and chips disagree about head sizes, layouts, windows
and lengths, so the first form is taken that gives here what the reference gives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import structlog

from shared.errors import InvalidRequest

log = structlog.get_logger(__name__)

REFERENCE = "reference"
NAMES = ("TND", "TND+1", "BSND", "NZ", "NZ-host", REFERENCE)


@dataclass(frozen=True)
class Form:
    """How the kernel is called. `window_offset`: tokens before the query that a window of 0 would have."""

    # TND: all queries one behind the other; BSND: a batch of sequences of one length; NZ: over a cache in tiles, with
    # the lengths of keys on the device; NZ-host: with these on the host.
    layout: str
    window_offset: int = -1

    @property
    def name(self) -> str:
        """As `--npu-forms` has it."""
        return self.layout if self.window_offset < 0 else f"{self.layout}+{1 + self.window_offset}"


@dataclass(frozen=True)
class Heads:
    """Everything that a form is tried for: heads of queries and of keys, the size of each, and what else is asked."""

    num_q: int
    num_kv: int
    size: int
    window: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class Trial:
    """What came of trying a form: the largest difference from the reference, or why the kernel refused."""

    form: Form
    error: float
    agrees: bool
    refusal: str = ""


@dataclass(frozen=True)
class Choice:
    """Names of forms that are taken untried, and of those that never are."""

    taken: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()

    @classmethod
    def read(cls, text: str) -> Self:
        """Of `--npu-forms`. Raises InvalidRequest for a name that no form has."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name.removeprefix("-") not in NAMES]:
            raise InvalidRequest(
                "UNKNOWN_FORM",
                f"--npu-forms {text}: there is no form {', '.join(unknown)}; there are {', '.join(NAMES)}, each with a"
                " minus sign in front where it is not to be taken",
                field="npu_forms",
            )
        left = frozenset(name[1:] for name in names if name.startswith("-"))
        return cls(frozenset(names) - {f"-{name}" for name in left}, left)


Trials = Callable[[Heads, Sequence[Form]], Iterator[Trial]]


class Forms:
    """Finds a form for each kind of heads when it is first asked for them, before anything is served."""

    def __init__(
        self, known: Callable[[Heads], Sequence[Form]], trials: Trials, choice: Choice
    ) -> None:
        """known: all forms that heads may have; trials: tries forms, in this order."""
        self._known, self._trials, self._choice = known, trials, choice
        self._found: dict[Heads, Form | None] = {}

    def form(self, heads: Heads) -> Form | None:
        """The form for these heads; None if there is none. The first time it waits for trials."""
        if heads not in self._found:
            self._found[heads] = found = self._find(heads)
            if found is None:
                log.warning("attention has no fused kernel here and is slow", heads=str(heads))
            else:
                log.info("attention", form=found.name, heads=str(heads))
        return self._found[heads]

    def _find(self, heads: Heads) -> Form | None:
        forms = [form for form in self._known(heads) if form.name not in self._choice.left]
        taken = [form for form in forms if form.name in self._choice.taken]
        if taken or REFERENCE in self._choice.taken:
            return taken[0] if taken else None
        for trial in self._trials(heads, forms):
            if trial.agrees:
                return trial.form
            log.info("attention has another form", tried=str(trial))
        return None
