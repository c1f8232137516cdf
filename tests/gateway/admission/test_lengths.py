"""How long an answer may be, beside its prompt."""

import json
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.admission.request_spec import make_spec
from services.gateway.api.openai.requests import read_chat
from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from services.gateway.model.generation_defaults import GenerationDefaults
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from shared.prompts.length import require_prompt_fits
from shared.queue.token_log import encode_tokens
from tessera.preprocess.v1.preprocess_pb2 import PrepareResponse
from tests.support.gateway.served_model import model


def read(served: ServedModel, **body: Any) -> ValidRequest:
    content = {"messages": [{"role": "user", "content": "hello"}], **body}
    return read_chat(decode(json.dumps(content).encode(), ChatRequest), served)


def prepared(count: int) -> PrepareResponse:
    return PrepareResponse(token_ids=encode_tokens(range(count)))


def spec_of(count: int, **body: Any) -> Any:
    request = read(model(), **body)
    return make_spec(
        request, prepared(count), model(), request_id="r", tenant="t", created_unix_s=1
    )


def test_max_tokens_defaults_to_what_is_left_of_the_length() -> None:
    assert spec_of(100).sampling.max_tokens == 412
    assert spec_of(511).sampling.max_tokens == 1
    assert spec_of(100, max_tokens=412).sampling.max_tokens == 412


@pytest.mark.parametrize(
    ("count", "body", "expected"),
    [(100, {}, 64), (100, {"max_tokens": 200}, 200), (500, {}, 12), (100, {"max_tokens": 3}, 3)],
)
def test_the_checkpoint_limits_an_answer_without_max_tokens(
    count: int, body: dict[str, Any], expected: int
) -> None:
    served = replace(model(), defaults=GenerationDefaults(max_new_tokens=64))
    request = read(served, **body)
    spec = make_spec(request, prepared(count), served, request_id="r", tenant="t", created_unix_s=1)
    assert spec.sampling.max_tokens == expected
    assert request.cost_bound(served) >= expected


@pytest.mark.parametrize(("count", "body"), [(100, {"max_tokens": 413}), (512, {})])
def test_prompt_and_answer_must_fit_together(count: int, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="512") as caught:
        spec_of(count, **body)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_a_prompt_of_ids_is_refused_in_the_words_of_preprocess() -> None:
    """It does not go there: preprocess refuses other prompts of more than one token less than the length."""
    with pytest.raises(InvalidRequest) as expected:
        require_prompt_fits(512, 512, "messages", 511)
    with pytest.raises(InvalidRequest) as caught:
        spec_of(512)
    assert caught.value.message == expected.value.message
    assert caught.value.metadata == expected.value.metadata


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        spec_of(0)
