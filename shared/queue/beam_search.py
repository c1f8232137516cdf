"""What cannot be combined with beam search, for the gateway that reads a request and the scheduler that runs it."""

from tessera.common.v1.sampling_pb2 import SamplingParams

# Each changes which tokens are likely; beams are ranked by the model's own probabilities.
_CONFLICTS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_token_ids",
    "bad_words",
    "grammar",
)
_OFF = {"repetition_penalty": 1.0}


def conflict_with_beams(sampling: SamplingParams) -> str | None:
    """The name of the first parameter that is set and cannot be combined with beam search; None if there is none."""
    for name in _CONFLICTS:
        value = getattr(sampling, name, None)  # a field that a newer contract has is empty here
        if value and value != _OFF.get(name):
            return name
    return None
