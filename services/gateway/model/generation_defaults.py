"""What `generation_config.json` says of sampling: the defaults of requests, and what is not obeyed here.

Names and meanings are those of `transformers.GenerationConfig`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The fields that are defaults of request fields with the same names.
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields that `generate` obeys and nothing here does, with the values that change nothing; null is one of each.
UNHEEDED: Mapping[str, Collection[Any]] = {
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_length": (20,),  # which older versions write where nobody set it
    "max_time": (),
    "min_length": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "watermarking_config": (),
}
# The same of fields that count where tokens are drawn.
UNHEEDED_DRAWING: Mapping[str, Collection[Any]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values of requests that name none, and `unheeded`: fields that are set and have no effect here."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int = 0  # 0 is what the model's length leaves
    min_new_tokens: int = 0
    bad_token_ids: tuple[int, ...] = ()
    first_bad_token_ids: tuple[int, ...] = ()  # of the first token alone
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    stop: tuple[str, ...] = ()
    unheeded: tuple[str, ...] = ()


def read_defaults(
    config: Mapping[str, Any], vocab_size: int, eos_token_ids: Collection[int], max_model_len: int
) -> GenerationDefaults:
    """From `generation_config.json`. Ids that the model does not have are left out, as they can never be chosen.

    Raises TypeError or ValueError for values of other types than the fields have.
    """
    numbers = {key: config[key] for key in NUMBERS if config.get(key) is not None}
    if config.get("do_sample") is False:
        numbers["temperature"] = 0.0
    words = [tuple(_ids(word, vocab_size)) for word in config.get("bad_words_ids") or ()]
    stop = config.get("stop_strings") or ()
    return GenerationDefaults(
        numbers,
        max_new_tokens=_count(config.get("max_new_tokens")),
        min_new_tokens=_count(config.get("min_new_tokens")),
        bad_token_ids=tuple(_ids(config.get("suppress_tokens"), vocab_size)),
        first_bad_token_ids=tuple(_ids(config.get("begin_suppress_tokens"), vocab_size)),
        bad_words=tuple(
            word
            for word, given in zip(words, config.get("bad_words_ids") or (), strict=True)
            # As upstream: an end alone is no bad word.
            if len(word) == len(given) > 0 and (len(word) > 1 or word[0] not in eos_token_ids)
        ),
        no_repeat_ngram_size=_count(config.get("no_repeat_ngram_size")),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        unheeded=tuple(_unheeded(config, max_model_len, greedy=numbers.get("temperature") == 0)),
    )


def _unheeded(config: Mapping[str, Any], max_model_len: int, *, greedy: bool) -> Iterable[str]:
    if _count(config.get("max_length")) not in range(1, max_model_len):
        config = {**config, "max_length": None}
    fields = {**UNHEEDED, **({} if greedy else UNHEEDED_DRAWING)}
    for name in sorted(fields):
        value = config.get(name)
        if value is not None and value not in fields[name]:
            yield name


def _ids(given: Iterable[Any] | None, vocab_size: int) -> Iterable[int]:
    return (int(token) for token in given or () if 0 <= int(token) < vocab_size)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
