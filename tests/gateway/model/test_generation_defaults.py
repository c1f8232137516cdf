"""What generation_config.json sets for requests, and what it names that has no effect here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from transformers import GenerationConfig

from services.gateway.api.openai.requests import read_chat
from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from services.gateway.model import generation_defaults
from services.gateway.model.generation_defaults import GenerationDefaults, read_defaults
from services.gateway.model.served_model import ServedModel
from shared.errors import Precondition
from tessera.common.v1.sampling_pb2 import SamplingParams
from tests.support.gateway.served_model import model
from tests.support.gateway.stage import write_model
from tests.support.tokenizers import byte_level_tokenizer

DEFAULTS = GenerationDefaults(
    min_new_tokens=5,
    bad_token_ids=(7, 8),
    first_bad_token_ids=(9,),
    bad_words=((3, 4),),
    no_repeat_ngram_size=3,
    stop=("END",),
)


def sampling(**body: Any) -> SamplingParams:
    content = {"messages": [{"role": "user", "content": "hello"}], **body}
    request = decode(json.dumps(content).encode(), ChatRequest)
    return read_chat(request, replace(model(), defaults=DEFAULTS)).sampling


def test_a_request_that_says_nothing_gets_them() -> None:
    found = sampling()
    assert (found.min_tokens, found.no_repeat_ngram_size) == (5, 3)
    assert list(found.bad_token_ids) == [7, 8] and list(found.first_bad_token_ids) == [9]
    assert [list(word.ids) for word in found.bad_words] == [[3, 4]]
    assert list(found.stop) == ["END"]
    assert sampling(max_tokens=2).min_tokens == 2


def test_a_requests_own_values_go_before_them() -> None:
    found = sampling(min_tokens=0, bad_token_ids=[], bad_words=[], stop=[])
    assert not (found.min_tokens or found.bad_token_ids or found.bad_words or found.stop)
    assert list(sampling(stop="x", bad_token_ids=[1]).bad_token_ids) == [1]


def test_beams_go_without_them() -> None:
    found = sampling(use_beam_search=True, n=2)
    assert not (found.bad_token_ids or found.first_bad_token_ids or found.no_repeat_ngram_size)
    assert not (found.min_tokens or found.bad_words or found.stop)


def test_what_is_read() -> None:
    config = {
        "min_new_tokens": 4,
        "suppress_tokens": [3, 600],
        "begin_suppress_tokens": [1],
        "bad_words_ids": [[2], [5], [6, 2], [6, 600]],
        "no_repeat_ngram_size": 2,
        "stop_strings": "###",
        "renormalize_logits": True,  # which changes no choice
        "max_length": 4096,
        "top_h": None,
    }
    found = read_defaults(config, 512, (2,), 4096)
    assert found == GenerationDefaults(
        min_new_tokens=4,
        bad_token_ids=(3,),
        first_bad_token_ids=(1,),
        bad_words=((5,), (6, 2)),
        no_repeat_ngram_size=2,
        stop=("###",),
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 0.0}, ["epsilon_cutoff", "typical_p"]),
        ({"typical_p": 0.9, "top_h": 0.4, "do_sample": False}, []),
        ({"forced_eos_token_id": 2, "max_time": 1.5}, ["forced_eos_token_id", "max_time"]),
        ({"num_beams": 4, "min_length": 30, "max_length": 100}, ["max_length", "min_length", "num_beams"]),
        ({"num_beams": 1, "min_length": 0, "encoder_no_repeat_ngram_size": 0}, []),
        ({"guidance_scale": 1.5, "sequence_bias": [[[4, 5], -1.0]]}, ["guidance_scale", "sequence_bias"]),
    ],
)  # fmt: skip
def test_fields_without_effect_are_named_at_the_start(
    tmp_path: Path, config: dict[str, Any], named: list[str]
) -> None:
    folder = write_model(tmp_path / "model", byte_level_tokenizer())
    (folder / "generation_config.json").write_text(json.dumps(config))
    with structlog.testing.capture_logs() as lines:
        served = ServedModel.load(folder, "m", 512)
    assert list(served.defaults.unheeded) == named
    assert [line["fields"] for line in lines if "generation_config" in line["event"]] == (
        [named] if named else []
    )


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level_tokenizer())
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": 5}))
    with pytest.raises(Precondition, match=r"generation_config\.json has a value of a wrong type"):
        ServedModel.load(folder, "m", 512)


def test_every_field_of_generate_that_changes_tokens_is_known() -> None:
    """Those that are not named are about speed, ids and what `generate` returns."""
    known = {
        *generation_defaults.UNHEEDED,
        *generation_defaults.UNHEEDED_DRAWING,
        *generation_defaults.NUMBERS,
        *("do_sample", "max_new_tokens", "min_new_tokens", "suppress_tokens", "bad_words_ids"),
        *("begin_suppress_tokens", "no_repeat_ngram_size", "stop_strings", "renormalize_logits"),
    }
    others = {
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
        *("assistant_lookbehind", "bos_token_id", "cache_config", "cache_implementation"),
        *("compile_config", "continuous_batching_config", "decoder_start_token_id"),
        *("disable_compile", "early_stopping", "eos_token_id", "is_assistant", "length_penalty"),
        *("max_cache_len", "max_matching_ngram_size", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "output_attentions", "output_hidden_states"),
        *("output_logits", "output_scores", "pad_token_id", "prefill_chunk_size"),
        *("prompt_lookup_num_tokens", "return_dict_in_generate", "speculation_type"),
        *("target_lookbehind", "transformers_version", "use_cache", "use_mtp"),
        *("diversity_penalty", "num_beam_groups", "low_memory"),  # of beams
    }
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - known - others == set()
