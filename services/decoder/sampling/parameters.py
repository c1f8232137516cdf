"""Which sampling parameters the sampler can honour."""

from shared.errors import InvalidRequest
from tessera.common.v1.sampling_pb2 import SamplingParams

# Below this temperature the choice is greedy: dividing by it would overflow.
COLD = 1e-5
# Wide beams with many stop ids ask for thousands.
MAX_LOGPROBS = 1 << 16


def check_params(params: SamplingParams, *, with_grammars: bool = False) -> None:
    """Raises InvalidRequest naming the first field that is out of range or not supported.

    Beams are chosen by the scheduler, which asks for the log-probabilities of each and says nothing
    of beams here.
    """
    if params.use_beam_search:
        raise InvalidRequest(
            "UNSUPPORTED_SAMPLING",
            "use_beam_search is the scheduler's: a decoder only scores beams",
            field="use_beam_search",
        )
    if params.grammar and not with_grammars:
        raise InvalidRequest(
            "UNSUPPORTED_SAMPLING", "grammar is not supported here: leave it out", field="grammar"
        )
    ranges = (
        ("temperature", params.temperature, 0.0, 1e6),
        ("min_p", params.min_p, 0.0, 1.0),
        ("top_k", params.top_k, 0, 2**31 - 1),
        ("no_repeat_ngram_size", params.no_repeat_ngram_size, 0, 2**31 - 1),
        ("repetition_penalty", params.repetition_penalty, 1e-6, 1e6),
        ("presence_penalty", params.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", params.frequency_penalty, -1e6, 1e6),
        ("logprobs", params.logprobs, 0, MAX_LOGPROBS),
        ("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise _out_of_range(name, value, f"[{low}, {high}]")
    if params.temperature >= COLD and not 0 < params.top_p <= 1:
        raise _out_of_range("top_p", params.top_p, "(0, 1]")


def _out_of_range(name: str, value: float, bounds: str) -> InvalidRequest:
    return InvalidRequest("INVALID_SAMPLING", f"{name} is {value}, not in {bounds}", field=name)
