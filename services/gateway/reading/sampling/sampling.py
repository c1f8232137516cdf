"""Sampling parameters: from a request's options and the model's defaults to values that need no
default any more.
"""

from collections.abc import Mapping

from services.gateway.decoding.bounds import INT32_MAX, at_most, number, texts, whole, wholes, wrong
from services.gateway.decoding.list_limits import MOST_IDS, MOST_STOP_IDS
from services.gateway.model.generation_defaults import GenerationDefaults
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.logprob_fields import Logprobs
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.sampling.bad_words import read_bad_words
from services.gateway.reading.sampling.choices import read_choices
from shared.environment import random_bytes
from shared.queue.beam_search import conflict_with_beams
from tessera.common.v1.sampling_pb2 import SamplingParams, TokenSequence

MOST_STOPS = 16
_LONGEST_STOP = 1024


def read_sampling(
    options: GenerationOptions, model: ServedModel, logprobs: Logprobs
) -> SamplingParams:
    """The parameters of one request. `max_tokens` stays 0 if the client named none: the
    checkpoint's own then, or all that is left.

    Raises InvalidRequest naming the field and its limit.
    """
    last_id = model.vocab_size - 1
    choices = read_choices(options, model.max_choices)
    # Beams are ranked by the model's own probabilities.
    defaults = GenerationDefaults() if choices.beams else model.defaults
    seed = whole("seed", options.seed, -(1 << 63), (1 << 64) - 1)
    max_tokens = read_max_tokens(options, model)
    longest = max_tokens or model.max_model_len
    allowed = wholes("allowed_token_ids", options.allowed_token_ids, 0, last_id, MOST_IDS)
    if options.allowed_token_ids is not None and not allowed:
        raise wrong("allowed_token_ids", "must hold at least one id: leave it out to allow all")
    sampling = SamplingParams(
        presence_penalty=number("presence_penalty", options.presence_penalty, 0.0, -2, 2),
        frequency_penalty=number("frequency_penalty", options.frequency_penalty, 0.0, -2, 2),
        # -1 is vLLM's way to say none; else a negative one is the unsigned number of the same 64 bits.
        seed=int.from_bytes(random_bytes(8)) if seed is None or seed == -1 else seed % (1 << 64),
        max_tokens=max_tokens or 0,
        min_tokens=_given(
            whole("min_tokens", options.min_tokens, 0, longest),
            min(defaults.min_new_tokens, longest),
        ),
        n=choices.n,
        best_of=choices.best_of,
        use_beam_search=choices.beams,
        length_penalty=choices.length_penalty,
        early_stopping=choices.early_stopping,
        early_stopping_never=choices.exhaustive,
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
        logit_bias=_logit_bias(options.logit_bias, last_id),
        allowed_token_ids=allowed,
        bad_token_ids=defaults.bad_token_ids
        if options.bad_token_ids is None
        else wholes("bad_token_ids", options.bad_token_ids, 0, last_id, MOST_IDS),
        bad_words=[TokenSequence(ids=ids) for ids in defaults.bad_words]
        if options.bad_words is None
        else read_bad_words(options.bad_words, model.tokenizer),
        first_bad_token_ids=defaults.first_bad_token_ids,
        no_repeat_ngram_size=defaults.no_repeat_ngram_size,
        ignore_eos=options.ignore_eos is True,
        stop=defaults.stop
        if options.stop is None
        else texts("stop", options.stop, MOST_STOPS, _LONGEST_STOP),
        stop_token_ids=_stop_ids(options, model),
        include_stop_str_in_output=options.include_stop_str_in_output is True,
    )
    _read_truncation(options, defaults.numbers, sampling)
    if choices.beams:
        if (conflict := conflict_with_beams(sampling)) is not None:
            raise wrong(
                conflict,
                "cannot be combined with use_beam_search, which ranks by the model's own"
                " probabilities: leave it out",
            )
        sampling.temperature = 0
    return sampling


def _stop_ids(options: GenerationOptions, model: ServedModel) -> list[int]:
    last_id = model.vocab_size - 1
    ids = wholes("stop_token_ids", options.stop_token_ids, 0, last_id, MOST_STOP_IDS)
    return sorted({*ids, *(() if options.ignore_eos else model.eos_token_ids)})


def _read_truncation(
    options: GenerationOptions, defaults: Mapping[str, float], sampling: SamplingParams
) -> None:
    # -1 is vLLM's way to say off.
    top_k = whole("top_k", options.top_k, -1, INT32_MAX)
    sampling.top_k = max(0, int(defaults.get("top_k", 0)) if top_k is None else top_k)
    for name, value, default, high in (
        ("temperature", options.temperature, 1.0, 2),
        ("top_p", options.top_p, 1.0, 1),
        ("min_p", options.min_p, 0.0, 1),
        ("repetition_penalty", options.repetition_penalty, 1.0, 100),
    ):
        setattr(sampling, name, number(name, value, defaults.get(name, default), 0, high))
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise wrong(name, "must be greater than 0")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def read_max_tokens(options: GenerationOptions, model: ServedModel) -> int | None:
    """`max_completion_tokens`, or `max_tokens` as it used to be called; within the model's length."""
    limit = model.max_model_len
    newer = whole("max_completion_tokens", options.max_completion_tokens, 1, limit)
    older = whole("max_tokens", options.max_tokens, 0 if scores_prompt_only(options) else 1, limit)
    if newer is not None:
        return newer
    return 1 if older == 0 else older


def scores_prompt_only(options: GenerationOptions) -> bool:
    """Whether a completion of no tokens is asked for, to see its prompt scored or repeated. One
    token is computed for it and dropped.
    """
    if options.max_tokens != 0 or options.max_completion_tokens is not None:
        return False
    return options.echo is True or options.prompt_logprobs is not None


def _logit_bias(entries: Mapping[str, float] | None, last_id: int) -> dict[int, float]:
    if not entries:
        return {}
    at_most("logit_bias", len(entries), MOST_IDS, "ids")
    bias = {}
    for name, value in entries.items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10 or int(name) > last_id:
            raise wrong(
                "logit_bias",
                f"has the key {name[:24]!r}: keys must be token ids, which are 0 to {last_id}",
            )
        bias[int(name)] = number(f"logit_bias.{name}", value, 0.0, -100, 100)
    return bias
