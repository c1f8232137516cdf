"""How many answers a request wants, and how they are searched: `n`, `best_of`, beams."""

from dataclasses import dataclass

from services.gateway.decoding.bounds import number, whole, wrong
from services.gateway.reading.options import GenerationOptions


@dataclass(frozen=True, slots=True)
class Choices:
    """`n` answers, the best of `best_of`; with `beams` found by beam search."""

    n: int
    best_of: int
    beams: bool
    length_penalty: float
    early_stopping: bool
    exhaustive: bool = False  # early_stopping "never"


def read_choices(options: GenerationOptions, most: int) -> Choices:
    """Reads and checks them, at most `most` of either. Raises InvalidRequest naming the field.

    A stream gives out tokens as they come: it cannot wait for the best.
    """
    n = whole("n", options.n, 1, most) or 1
    best_of = whole("best_of", options.best_of, 1, most) or n
    beams = options.use_beam_search is True
    if best_of < n:
        raise wrong("best_of", f"must be at least n, which is {n}")
    if options.stream and beams:
        raise wrong("use_beam_search", "cannot be streamed: set stream to false")
    if options.stream and best_of > n:
        raise wrong("best_of", "must equal n in a stream: set stream to false")
    if isinstance(options.early_stopping, str) and options.early_stopping != "never":
        raise wrong("early_stopping", 'must be true, false or "never"')
    if beams:
        _check_beams(options)
    else:
        _check_no_beams(options)
    return Choices(
        n,
        best_of,
        beams,
        number("length_penalty", options.length_penalty, 1.0, -10, 10),
        options.early_stopping is True,
        options.early_stopping == "never",
    )


def _check_beams(options: GenerationOptions) -> None:
    """What `shared/queue/beam_search.py` excludes is checked once all parameters have been read."""
    if options.stop and options.min_tokens:
        raise wrong(
            "min_tokens", "cannot be combined with stop in a beam search: leave one of them out"
        )


def _check_no_beams(options: GenerationOptions) -> None:
    text = "is for beams: set use_beam_search, or leave it out"
    if options.length_penalty not in (None, 1):
        raise wrong("length_penalty", text)
    if options.early_stopping not in (None, False):
        raise wrong("early_stopping", text)
