"""Sampling parameters: from a request's fields and the model's defaults to values that need no
default any more.
"""

import secrets

from services.gateway.fields import Fields
from services.gateway.model import ServedModel
from tessera.common.v1.sampling_pb2 import SamplingParams

_INT32_MAX = (1 << 31) - 1
_MOST_STOPS = 16
_LONGEST_STOP = 1024


def read_sampling(fields: Fields, model: ServedModel) -> SamplingParams:
    """The parameters of one request. `max_tokens` stays 0 if the client named none: all that is
    left then.

    Raises InvalidRequest naming the field and its limit.
    """
    defaults = model.sampling_defaults
    last_id = model.vocab_size - 1
    seed = fields.integer("seed", 0, (1 << 64) - 1)
    # -1 is vLLM's way to say off.
    top_k = fields.integer("top_k", -1, _INT32_MAX)
    max_tokens = read_max_tokens(fields, model)
    ignore_eos = fields.boolean("ignore_eos", False)
    stop_ids = fields.integers("stop_token_ids", 0, last_id)
    sampling = SamplingParams(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), 0, 2),
        top_p=fields.number("top_p", defaults.get("top_p", 1.0), 0, 1),
        top_k=max(0, int(defaults.get("top_k", 0)) if top_k is None else top_k),
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), 0, 1),
        repetition_penalty=fields.number(
            "repetition_penalty", defaults.get("repetition_penalty", 1.0), 0, 100
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        seed=secrets.randbits(64) if seed is None else seed,
        max_tokens=max_tokens or 0,
        min_tokens=fields.integer("min_tokens", 0, max_tokens or model.max_model_len) or 0,
        ignore_eos=ignore_eos,
        stop_token_ids=sorted({*stop_ids, *(() if ignore_eos else model.eos_token_ids)}),
        stop=fields.strings("stop", _MOST_STOPS, _LONGEST_STOP),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        n=1,
        best_of=1,
        length_penalty=1.0,
        logit_bias=_logit_bias(fields, last_id),
    )
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise fields.wrong(name, "must be greater than 0")
    return sampling


def read_max_tokens(fields: Fields, model: ServedModel) -> int | None:
    """`max_completion_tokens`, or `max_tokens` as it used to be called; within the model's length."""
    limit = model.max_model_len
    newer = fields.integer("max_completion_tokens", 1, limit)
    older = fields.integer("max_tokens", 1, limit)
    return older if newer is None else newer


def _logit_bias(fields: Fields, last_id: int) -> dict[int, float]:
    entries = fields.mapping("logit_bias")
    bias = {}
    for name, _ in entries.items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10 or int(name) > last_id:
            raise fields.wrong("logit_bias", f"has {name[:24]!r}; token ids are 0 to {last_id}")
        bias[int(name)] = entries.number(name, 0.0, -100, 100)
    return bias
