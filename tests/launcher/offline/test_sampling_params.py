"""Parameters are checked when they are made, and say everything to the server."""

from typing import Any

import pytest

from services.launcher.offline import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("best_of", 0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("temperature", -0.1), ("top_p", 0), ("top_p", 1.1), ("min_p", 1.1), ("top_k", -2), ("max_tokens", 0),
        ("min_tokens", 17), ("logprobs", -1), ("prompt_logprobs", -1), ("allowed_token_ids", []), ("stop", [""]),
    ],
)  # fmt: skip
def test_what_is_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must "):
        SamplingParams(**{field: value})


def test_an_unknown_field_is_no_field() -> None:
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=0.5)  # type: ignore[call-arg]


def test_the_models_own_defaults_take_no_fields_place() -> None:
    said = SamplingParams(logprobs=2, logit_bias={7: 1.5}).fields(is_chat=False)
    assert (said["temperature"], said["top_p"], said["top_k"], said["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert said["repetition_penalty"] == 1.0 and said["max_tokens"] == 16 and said["logprobs"] == 2
    assert said["logit_bias"] == {"7": 1.5} and "seed" not in said and "stop" not in said
    chat = SamplingParams(logprobs=2).fields(is_chat=True)
    assert chat["logprobs"] is True and chat["top_logprobs"] == 2
    beams = SamplingParams(use_beam_search=True, best_of=3)
    assert "temperature" not in beams.fields(is_chat=False) and beams.is_chosen_at_end
    assert not SamplingParams(n=2, best_of=2).is_chosen_at_end
