"""Forms in which an operator may be called: documents, releases and chips disagree about head sizes, layouts, windows
and lengths, so the first form is taken that gives here what the reference gives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import structlog

from shared.errors import InvalidRequest

log = structlog.get_logger(__name__)

REFERENCE = "reference"
ATTENTION = ("TND", "TND+1", "BSND", "NZ", "NZ-host", "int8_BSND", "int8_BNSD")
WRITING = ("reshape_and_cache", "scatter_pa", "index_put")
EXPERTS = ("grouped", "grouped_nz", "grouped_finalize", "gating_softmax")
WEIGHTS = ("weights_nz",)
CODES = ("weight_quant", "weight_quant_t", "quant_matmul", "quant_matmul_fixed")
NAMES = (*ATTENTION, *WRITING, *EXPERTS, *WEIGHTS, *CODES, REFERENCE)


@dataclass(frozen=True)
class Form:
    """How the kernel is called. `window_offset`: tokens before the query that a window of 0 would have."""

    # Of attention: TND: all queries one behind the other; BSND: a batch of sequences of one length; NZ: over a cache in
    # tiles, with the lengths of keys on the device; NZ-host: with these on the host; int8_...: over codes, in this
    # layout. Of all others: the operator.
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
class CodedHeads:
    """What a form of attention to keys and values of 8 bits is tried for, by single queries: heads of queries and of
    keys, the size of each, of how many elements upper digits lie behind those (`UpperDigits`), and elements of all."""

    num_q: int
    num_kv: int
    size: int
    width: int
    upper: int = 0


@dataclass(frozen=True)
class Writing:
    """What a form of writing to the cache is tried for: heads of keys, the size of each there, and whether they are
    codes of 8 bits."""

    num_kv: int
    size: int
    coded: bool = False


@dataclass(frozen=True)
class Grouping:
    """What a form of computing experts is tried for: see `ExpertLayer`."""

    count: int
    hidden: int
    up: int
    inner: int
    has_bias: bool = False


@dataclass(frozen=True)
class Routing:
    """What a form of choosing k of `count` experts is tried for."""

    count: int
    k: int


@dataclass(frozen=True)
class Weights:
    """What a layout of a linear layer's weight is tried for; `faster`: it is to be faster than the plain one."""

    out: int
    inputs: int
    faster: bool = False


@dataclass(frozen=True)
class Coded:
    """What a product with a weight of codes is tried for: see `QuantizedWeight`. `inputs`: columns of codes;
    `activations`: bits in which these meet the codes; `fixed`: with one step for all tokens."""

    out: int
    inputs: int
    bits: int
    group: int
    has_zeros: bool = False
    activations: int = 16
    fixed: bool = False


Asked = Heads | CodedHeads | Writing | Grouping | Routing | Weights | Coded
KINDS: dict[str, type[Asked]] = {
    kind.__name__: kind for kind in (Heads, CodedHeads, Writing, Grouping, Routing, Weights, Coded)
}


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


Trials = Callable[[Asked, Sequence[Form]], Iterator[Trial]]


class Forms:
    """Finds a form for whatever is asked when that is first asked for, before anything is served."""

    def __init__(
        self, known: Callable[[Asked], Sequence[Form]], trials: Trials, choice: Choice
    ) -> None:
        """known: all forms there are; trials: tries forms, in this order."""
        self._known, self._trials, self._choice = known, trials, choice
        self._found: dict[Asked, Form | None] = {}

    def form(self, asked: Asked) -> Form | None:
        """The form for it; None if there is none. The first time it waits for trials."""
        if asked not in self._found:
            self._found[asked] = found = self._find(asked)
            if found is None and isinstance(asked, Coded):
                log.warning("no form is right: codes become numbers", asked=str(asked))
            elif found is None and isinstance(asked, CodedHeads):
                log.warning("no form attends to keys and values of 8 bits", asked=str(asked))
            elif found is None:
                log.warning("the reference computes, slowly: no form is right", asked=str(asked))
            else:
                log.info("found a form", form=found.name, asked=str(asked))
        return self._found[asked]

    def _find(self, asked: Asked) -> Form | None:
        forms = [form for form in self._known(asked) if form.name not in self._choice.left]
        taken = [form for form in forms if form.name in self._choice.taken]
        if taken or REFERENCE in self._choice.taken:
            return taken[0] if taken else None
        for trial in self._trials(asked, forms):
            if trial.agrees:
                return trial.form
            log.info("a form is not right", tried=str(trial), asked=str(asked))
        return None
