"""Forms in which an operator for attention may be called: documents, releases and chips disagree about head sizes,
layouts, windows and lengths, so the first form is taken that gives here what the reference gives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Form:
    """How the kernel is called. `window_offset`: tokens before the query that a window of 0 would have."""

    # TND: all queries one behind the other; BSND: a batch of sequences of one length; NZ: over a cache in tiles, with
    # the lengths of keys on the device, or where that is said on the host.
    layout: str
    window_offset: int = -1


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


class AttentionForms:
    """Finds a form for each kind of heads when it is first asked for them, before anything is served."""

    def __init__(self, trials: Callable[[Heads], Iterator[Trial]]) -> None:
        """trials: tries every form that heads may have."""
        self._trials = trials
        self._found: dict[Heads, Form | None] = {}

    def form(self, heads: Heads) -> Form | None:
        """The form for these heads; None if there is none. The first time it waits for the device."""
        if heads not in self._found:
            self._found[heads] = found = self._find(heads)
            if found is None:
                log.warning("attention has no fused kernel here and is slow", heads=str(heads))
            else:
                log.info("attention", form=found.layout, heads=str(heads))
        return self._found[heads]

    def _find(self, heads: Heads) -> Form | None:
        for trial in self._trials(heads):
            if trial.agrees:
                return trial.form
            log.debug("attention has another form", tried=str(trial))
        return None
