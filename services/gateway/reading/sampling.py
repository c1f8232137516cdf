"""Sampling parameters: from a request's fields and the model's defaults to values that need no
default any more.
"""

import secrets
from collections.abc import Mapping

from services.gateway.admission.model import ServedModel
from services.gateway.reading.bad_words import read_bad_words
from services.gateway.reading.choices import read_candidates
from services.gateway.reading.fields import Fields
from services.gateway.reading.list_limits import MOST_IDS, MOST_STOP_IDS
from services.gateway.reading.logprob_fields import Logprobs
from tessera.common.v1.sampling_pb2 import SamplingParams

_INT32_MAX = (1 << 31) - 1
_MOST_STOPS = 16
_LONGEST_STOP = 1024


def read_sampling(fields: Fields, model: ServedModel, logprobs: Logprobs) -> SamplingParams:
    """The parameters of one request. `max_tokens` stays 0 if the client named none: the
    checkpoint's own then, or all that is left.

    Raises InvalidRequest naming the field and its limit.
    """
    last_id = model.vocab_size - 1
    candidates = read_candidates(fields, model.max_choices)
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    max_tokens = read_max_tokens(fields, model)
    sampling = SamplingParams(
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        # -1 is vLLM's way to say none; else a negative one is the unsigned number of the same 64 bits.
        seed=secrets.randbits(64) if seed is None or seed == -1 else seed % (1 << 64),
        max_tokens=max_tokens or 0,
        min_tokens=fields.integer("min_tokens", 0, max_tokens or model.max_model_len) or 0,
        n=candidates.n,
        best_of=candidates.best_of,
        use_beam_search=candidates.beams,
        length_penalty=candidates.length_penalty,
        early_stopping=candidates.early_stopping,
        early_stopping_never=candidates.exhaustive,
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
        logit_bias=_logit_bias(fields, last_id),
        allowed_token_ids=fields.integers("allowed_token_ids", 0, last_id, MOST_IDS),
        bad_token_ids=fields.integers("bad_token_ids", 0, last_id, MOST_IDS),
        bad_words=read_bad_words(fields, model.tokenizer),
    )
    _read_stops(fields, model, sampling)
    _read_truncation(fields, {} if candidates.beams else model.sampling_defaults, sampling)
    if candidates.beams:
        sampling.temperature = 0
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise fields.wrong(name, "must be greater than 0")
    if "allowed_token_ids" in fields and not sampling.allowed_token_ids:
        raise fields.wrong("allowed_token_ids", "must hold at least one id")
    return sampling


def _read_stops(fields: Fields, model: ServedModel, sampling: SamplingParams) -> None:
    sampling.ignore_eos = fields.boolean("ignore_eos", False)
    stop_ids = fields.integers("stop_token_ids", 0, model.vocab_size - 1, MOST_STOP_IDS)
    eos = () if sampling.ignore_eos else model.eos_token_ids
    sampling.stop_token_ids[:] = sorted({*stop_ids, *eos})
    sampling.stop[:] = fields.strings("stop", _MOST_STOPS, _LONGEST_STOP)
    sampling.include_stop_str_in_output = fields.boolean("include_stop_str_in_output", False)


def _read_truncation(
    fields: Fields, defaults: Mapping[str, float], sampling: SamplingParams
) -> None:
    # -1 is vLLM's way to say off.
    top_k = fields.integer("top_k", -1, _INT32_MAX)
    sampling.top_k = max(0, int(defaults.get("top_k", 0)) if top_k is None else top_k)
    for name, default, high in (
        ("temperature", 1.0, 2),
        ("top_p", 1.0, 1),
        ("min_p", 0.0, 1),
        ("repetition_penalty", 1.0, 100),
    ):
        setattr(sampling, name, fields.number(name, defaults.get(name, default), 0, high))


def read_max_tokens(fields: Fields, model: ServedModel) -> int | None:
    """`max_completion_tokens`, or `max_tokens` as it used to be called; within the model's length."""
    limit = model.max_model_len
    newer = fields.integer("max_completion_tokens", 1, limit)
    older = fields.integer("max_tokens", 0 if scores_prompt_only(fields) else 1, limit)
    if newer is not None:
        return newer
    return 1 if older == 0 else older


def scores_prompt_only(fields: Fields) -> bool:
    """Whether a completion of no tokens is asked for, to see its prompt scored or repeated. One
    token is computed for it and dropped.
    """
    if fields.raw("max_tokens") != 0 or fields.raw("max_completion_tokens") is not None:
        return False
    return fields.raw("echo") is True or fields.raw("prompt_logprobs") is not None


def _logit_bias(fields: Fields, last_id: int) -> dict[int, float]:
    entries = fields.mapping("logit_bias")
    if len(entries.items()) > MOST_IDS:
        raise fields.wrong("logit_bias", f"must not hold more than {MOST_IDS} ids")
    bias = {}
    for name, _ in entries.items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10 or int(name) > last_id:
            raise fields.wrong("logit_bias", f"has {name[:24]!r}; token ids are 0 to {last_id}")
        bias[int(name)] = entries.number(name, 0.0, -100, 100)
    return bias
