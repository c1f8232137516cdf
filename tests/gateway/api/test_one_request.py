"""REST and gRPC give one typed request, and an answer is written in the form that its request came in by."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.api.openai import requests
from services.gateway.api.openai.message_replies import MessageWriter
from services.gateway.api.openai.replies import ReplyWriter
from services.gateway.api.openai.schema import ChatRequest, CompletionRequest
from services.gateway.api.reply_forms import ReplyForms
from services.gateway.api.tessera import grpc_requests
from services.gateway.apis import APIS
from services.gateway.decoding.decode import decode
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import Precondition, Unavailable
from tessera.gateway.v1 import chat_pb2
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind, RequestSpec
from tests.support.gateway.served_model import model

# Every option that both have; values that a 32-bit float holds exactly.
OPTIONS: dict[str, Any] = {
    "user": "ada", "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 9,
    "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0, "stop": ["a", "b"],
    "stop_token_ids": [6], "ignore_eos": True, "include_stop_str_in_output": True, "return_token_ids": True,
    "skip_special_tokens": False, "allowed_token_ids": [3, 4], "bad_token_ids": [8], "bad_words": ["red"],
    "min_tokens": 2, "n": 2, "best_of": 3, "prompt_logprobs": 5, "priority": -3, "truncate_prompt_tokens": 20,
    "timeout": 1.5, "service_tier": "flex", "cache_salt": "team",
}  # fmt: skip


def over_rest(**body: Any) -> ValidRequest:
    if "messages" in body:
        return requests.read_chat(decode(json.dumps(body).encode(), ChatRequest), model())
    (found,) = requests.read_completions(
        decode(json.dumps(body).encode(), CompletionRequest), model()
    )
    return found


def chat_over_grpc(**options: Any) -> ValidRequest:
    message = chat_pb2.ChatMessage(role="user", content=[chat_pb2.ContentPart(text="hello")])
    request = chat_pb2.ChatRequest(
        messages=[message], options=chat_pb2.GenerationOptions(**options)
    )
    read = grpc_requests.read_options(request.model, request.options)
    return grpc_requests.read_chat(request, read, model())


def test_a_chat_is_the_same_request_over_both() -> None:
    messages = [{"role": "user", "content": "hello"}]
    bias = {"logit_bias": {"7": -100.0}}
    rest = over_rest(messages=messages, logprobs=True, top_logprobs=4, **OPTIONS, **bias)
    assert rest == chat_over_grpc(**OPTIONS, logprobs=4, logit_bias={7: -100.0})


def test_beams_are_the_same_request_over_both() -> None:
    beams = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5, "seed": 1}
    rest = over_rest(
        messages=[{"role": "user", "content": "hello"}], **beams, early_stopping="never"
    )
    assert rest == chat_over_grpc(**beams, early_stopping_never=True)


@pytest.mark.parametrize("prompt", ["The red", [3, 4, 5]])
def test_a_completion_is_the_same_request_over_both(prompt: Any) -> None:
    rest = over_rest(prompt=prompt, echo=True, logprobs=1, seed=3, max_tokens=0)
    given = {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
    request = chat_pb2.CompleteRequest(
        echo=True,
        options=chat_pb2.GenerationOptions(logprobs=1, seed=3, max_tokens=0),
        **given,
    )
    read = grpc_requests.read_options("", request.options, echo=True)
    assert rest == grpc_requests.read_complete(request, read, model())


def test_every_kind_of_reply_has_its_writer() -> None:
    others = {ReplyKind.REPLY_KIND_UNSPECIFIED, ReplyKind.REPLY_KIND_POOLED}
    kinds = set(ReplyKind.values()) - others
    forms = {kind: form for api in APIS for kind, form in api.reply_forms.items()}
    assert set(forms) == kinds
    openai = (ReplyKind.REPLY_KIND_CHAT, ReplyKind.REPLY_KIND_COMPLETION)
    assert {forms[kind].make_writer for kind in openai} == {ReplyWriter}
    assert forms[ReplyKind.REPLY_KIND_CHAT_MESSAGE].make_writer is MessageWriter


def test_two_apis_cannot_have_one_kind_of_reply() -> None:
    forms = [api.reply_forms for api in APIS]
    with pytest.raises(ValueError, match="two APIs"):
        ReplyForms([*forms, *forms])


def test_a_pooled_prompt_is_no_stream() -> None:
    head = RequestSpec(reply=ReplyFormat(kind=ReplyKind.REPLY_KIND_POOLED))
    with pytest.raises(Precondition, match="none is a stream"):
        ReplyForms([]).make_writer(SimpleNamespace(head=head), True)  # type: ignore[arg-type]


def test_a_reply_of_a_later_version_is_left_to_another_gateway() -> None:
    head = RequestSpec(reply=ReplyFormat(kind=99))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="resume at another gateway") as caught:
        ReplyForms([]).make_writer(SimpleNamespace(head=head), True)  # type: ignore[arg-type]
    assert caught.value.http_status == 503
