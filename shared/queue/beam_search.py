"""What cannot be combined with beam search, for the gateway that reads a request and the scheduler that runs it."""

from tessera.common.v1.sampling_pb2 import SamplingParams

# Each changes which tokens are likely; beams are ranked by the model's own probabilities. Beside it: values that change
# nothing, in addition to zero and empty.
_CONFLICTS: dict[str, tuple[float, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (),
    "min_p": (),
    "presence_penalty": (),
    "frequency_penalty": (),
    "repetition_penalty": (1,),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_token_ids": (),
    "bad_words": (),
    "first_bad_token_ids": (),
    "no_repeat_ngram_size": (),
    "grammar": (),
}


def conflict_with_beams(sampling: SamplingParams) -> str | None:
    """The name of the first parameter that is set and cannot be combined with beam search; None if there is none."""
    for name, neutral in _CONFLICTS.items():
        value = getattr(sampling, name, None)  # a field that a newer contract has is empty here
        if value and value not in neutral:
            return name
    return None
