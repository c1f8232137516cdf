"""Beam search of a request: what it asks of the core, and the log of what was found."""

import numpy as np

from services.scheduler.core.beams import BeamSearch, Hypothesis, Step
from services.scheduler.core.sequence import INVALID_ARGUMENT, Ending, EndReason, Error, Sequence
from services.scheduler.output.stop_strings import BeamStops, stop_finder
from shared.queue.beam_search import conflict_with_beams
from shared.queue.token_log import encode_records, encode_tokens
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TokenBytes
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import RequestSpec

_MAX_LOGPROBS = 1024  # that a decoder reports for one sample


def search_of(
    spec: RequestSpec, table: TokenBytes, stops: StopStrings | None
) -> BeamSearch[Sequence]:
    """The search that a request with these stop strings asks for."""
    sampling, skip = spec.sampling, spec.reply.skip_special_tokens
    return BeamSearch(
        num_beams=max(sampling.best_of, sampling.n),
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        exhaustive=sampling.early_stopping_never,
        completes_stop_string=BeamStops(table, stops, skip_special_tokens=skip)
        if stops is not None
        else None,
        num_kept_top=sampling.logprobs,
    )


def refusal(sampling: SamplingParams, search: BeamSearch[Sequence]) -> Error | None:
    """Why a request with these parameters cannot be searched; None if it can."""
    if sampling.stop and sampling.min_tokens:
        message = "stop and min_tokens cannot both be combined with beam search: leave one out"
        return Error("UNSUPPORTED_WITH_BEAM_SEARCH", message, INVALID_ARGUMENT)
    if (conflict := conflict_with_beams(sampling)) is not None:
        message = f"{conflict} cannot be combined with beam search: leave it out"
        return Error("UNSUPPORTED_WITH_BEAM_SEARCH", message, INVALID_ARGUMENT)
    num_top = max(sampling.logprobs, search.num_top)
    if num_top > _MAX_LOGPROBS:
        message = (
            f"{search.num_beams} beams need the {num_top} most probable tokens of each step"
            f" and decoders report {_MAX_LOGPROBS}; ask for fewer beams or stop ids"
        )
        return Error("TOO_MANY_BEAMS", message, INVALID_ARGUMENT)
    return None


def result_of(
    search: BeamSearch[Sequence],
    number: int,
    spec: RequestSpec,
    table: TokenBytes,
    stops: StopStrings | None,
) -> tuple[bytes, Ending]:
    """Log records and ending of one of the hypotheses that a search has found, best first."""
    if number >= len(search.finished):
        message = f"beam search found {len(search.finished)} outputs only; ask for fewer"
        return b"", Ending(EndReason.ERROR, error=Error("TOO_FEW_HYPOTHESES", message))
    found = search.finished[number]
    steps = found.steps()
    return _records(steps, spec.sampling), _ending(found, steps, spec, table, stops)


def _ending(
    found: Hypothesis,
    steps: list[Step],
    spec: RequestSpec,
    table: TokenBytes,
    stops: StopStrings | None,
) -> Ending:
    if not found.has_stop_string or stops is None:
        reason = EndReason.LENGTH if found.stop_token_id is None else EndReason.STOP
        return Ending(reason, stop_token_id=found.stop_token_id)
    match = stop_finder(table, stops, spec, [step.token for step in steps[:-1]]).push(
        steps[-1].token
    )
    if match is None:
        raise ValueError("a beam ended with a stop string that is not in its text")
    return Ending(EndReason.STOP, stop=match.stop, cut=match.cut_bytes)


def _records(steps: list[Step], sampling: SamplingParams) -> bytes:
    tokens = [step.token for step in steps]
    if not sampling.HasField("logprobs"):
        return encode_tokens(tokens)
    own = np.array([step.logprob for step in steps], "<f4")
    ids = np.array([[token for token, _ in step.top] for step in steps], "<i4")
    values = np.array([[value for _, value in step.top] for step in steps], "<f4")
    return encode_records(tokens, own, ids, values, sampling.logprobs)
