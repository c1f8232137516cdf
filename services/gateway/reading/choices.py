"""How many answers a request wants, and how they are searched: `n`, `best_of`, beams."""

from dataclasses import dataclass

from services.gateway.reading.fields import Fields

# What a beam search would have to ignore, with the values that ask for nothing: beams are ranked by
# the model's own probabilities, undistorted.
_NOT_WITH_BEAMS: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "bad_token_ids": ([],),
}


@dataclass(frozen=True, slots=True)
class Candidates:
    """`n` answers, the best of `best_of`; with `beams` found by beam search."""

    n: int
    best_of: int
    beams: bool
    length_penalty: float
    early_stopping: bool
    exhaustive: bool = False  # early_stopping "never"


def read_candidates(fields: Fields, most: int) -> Candidates:
    """Reads and checks them, at most `most` of either. Raises InvalidRequest naming the field.

    A stream gives out tokens as they come: it cannot wait for the best.
    """
    n = fields.integer("n", 1, most) or 1
    best_of = fields.integer("best_of", 1, most) or n
    beams = fields.boolean("use_beam_search", False)
    stream = fields.boolean("stream", False)
    if best_of < n:
        raise fields.wrong("best_of", f"must be at least n, which is {n}")
    if stream and beams:
        raise fields.wrong("use_beam_search", "cannot be streamed: set stream to false")
    if stream and best_of > n:
        raise fields.wrong("best_of", "must equal n in a stream: set stream to false")
    if beams:
        _check_beams(fields)
    else:
        _check_no_beams(fields)
    never = fields.raw("early_stopping") == "never"
    return Candidates(
        n,
        best_of,
        beams,
        fields.number("length_penalty", 1.0, -10, 10),
        False if never else _early(fields),
        never,
    )


def _early(fields: Fields) -> bool:
    if isinstance(fields.raw("early_stopping"), str):
        raise fields.wrong("early_stopping", 'must be true, false or "never"')
    return fields.boolean("early_stopping", False)


def _check_beams(fields: Fields) -> None:
    for name, off in _NOT_WITH_BEAMS.items():
        if name in fields and fields.raw(name) not in off:
            raise fields.wrong(
                name,
                "cannot be combined with use_beam_search, which ranks by the model's own "
                "probabilities: leave it out",
            )

    if fields.raw("stop") and fields.raw("min_tokens"):
        raise fields.wrong(
            "min_tokens", "cannot be combined with stop in a beam search: leave one of them out"
        )


def _check_no_beams(fields: Fields) -> None:
    for name, off in (("length_penalty", 1), ("early_stopping", False)):
        if name in fields and fields.raw(name) != off:
            raise fields.wrong(name, "is for beams: set use_beam_search, or leave it out")
