"""What the REST door accepts, what it refuses, and how it names the field."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.tokenizers import byte_level_tokenizer

from services.gateway.model import ServedModel
from services.gateway.openai_requests import parse_body, read_chat, read_completion
from services.gateway.request import make_spec
from shared.errors import InvalidRequest, NotFound
from shared.text import TokenBytes
from shared.token_log import decode_tokens, encode_tokens
from tessera.preprocess.v1.preprocess_pb2 import PrepareResponse

PIXEL = b"\x89PNG-like bytes"
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()


def model(**defaults: float) -> ServedModel:
    return ServedModel(
        name="tiny",
        max_model_len=512,
        vocab_size=480,
        eos_token_ids=(2,),
        sampling_defaults=defaults,
        table=TokenBytes([b"x"] * 480),
        tokenizer=byte_level_tokenizer(),
        created_unix_s=0,
    )


def chat(**body: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **body}


def image(url: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": url}
    return {"messages": [{"role": "user", "content": [part]}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1e-60}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 513}, "max_tokens"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": -1}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": "x" * 2000}, "stop[0]"),
    ({"stop_token_ids": [480]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"logit_bias": {"480": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias.3"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"user": 5}, "user"),
    ({"user": "u" * 600}, "user"),
    ({"user": "\ud800"}, "user"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": float("nan")}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
        "messages[0].content[0].type",
    ),
    (image(None), "messages[0].content[0].image_url"),
    (image({}), "messages[0].content[0].image_url.url"),
    (image({"url": DATA_URL, "detail": "huge"}), "messages[0].content[0].image_url.detail"),
    (image("file:///etc/passwd"), "messages[0].content[0].image_url"),
    (image("data:image/png;base64"), "messages[0].content[0].image_url"),
    (image("data:image/png;base64,"), "messages[0].content[0].image_url"),
    (image("data:image/png;base64,@@@@"), "messages[0].content[0].image_url"),
    (image("data:text/html;base64,AAAA"), "messages[0].content[0].image_url"),
    (image("https://x/" + "y" * 9000), "messages[0].content[0].image_url"),
]

UNSUPPORTED: list[dict[str, Any]] = [
    {"echo": True},
    {"logits_processors": ["x"]},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"guided_json": {}},
    {"chat_template": "{{ x }}"},
]

HARMLESS: list[dict[str, Any]] = [
    {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}},
    {"n": None, "tools": None, "tool_choice": "none", "top_logprobs": 0, "logprobs": None},
    {"store": True, "metadata": {"a": "b"}, "reasoning_effort": "low", "parallel_tool_calls": True},
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda v: str(v)[:40])
def test_bad_values_name_their_field(change: Mapping[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_chat(chat(**change), model())
    assert caught.value.metadata["field"] == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("change", UNSUPPORTED, ids=str)
def test_what_is_not_offered_is_refused_by_name(change: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_chat(chat(**change), model())
    assert caught.value.reason == "UNSUPPORTED_PARAMETER"
    assert caught.value.metadata["field"] == next(iter(change))


@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_values_that_mean_off_and_unknown_fields_are_accepted(change: Mapping[str, Any]) -> None:
    read_chat(chat(**change), model())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe{}", b'"x"', b"[" * 100_000, b'{"a":' + b"9" * 9000 + b"}"],
)
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body)
    assert caught.value.reason == "INVALID_JSON"


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(NotFound) as caught:
        read_chat(chat(model="gpt-9"), model())
    assert caught.value.metadata["field"] == "model"


def test_defaults_come_from_the_checkpoint_and_the_request_wins() -> None:
    served = model(temperature=0.25, top_k=7.0, repetition_penalty=1.5)
    sampling = read_chat(chat(), served).sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.25, 7, 1.5)
    assert (sampling.top_p, sampling.n, sampling.max_tokens) == (1, 1, 0)
    assert list(sampling.stop_token_ids) == [2]
    sampling = read_chat(chat(temperature=0, top_k=-1, stop_token_ids=[5]), served).sampling
    assert (sampling.temperature, sampling.top_k) == (0, 0)
    assert list(sampling.stop_token_ids) == [2, 5]
    assert not read_chat(chat(ignore_eos=True), served).sampling.stop_token_ids


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {read_chat(chat(), model()).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert read_chat(chat(seed=7), model()).sampling.seed == 7


def test_max_completion_tokens_replaces_max_tokens() -> None:
    sampling = read_chat(chat(max_tokens=5, max_completion_tokens=6.0), model()).sampling
    assert sampling.max_tokens == 6


def test_conversations_keep_their_order_and_images() -> None:
    content = [
        {"type": "text", "text": "left"},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
        {"type": "image_url", "image_url": "https://example.org/a.png"},
        {"type": "text", "text": "right"},
    ]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": content, "name": "Ada"},
        {"role": "assistant", "content": "yes"},
    ]
    body = chat(messages=messages, chat_template_kwargs={"a": 1}, add_generation_prompt=False)
    conversation = read_chat(body, model()).prepare.conversation
    assert [message.role for message in conversation.messages] == ["system", "user", "assistant"]
    parts = conversation.messages[1].content
    assert [part.WhichOneof("part") for part in parts] == ["text", "image", "image", "text"]
    assert parts[1].image.data == PIXEL
    assert parts[1].image.field == "messages[1].content[1].image_url"
    assert parts[2].image.url == "https://example.org/a.png"
    assert conversation.messages[1].name == "Ada"
    assert json.loads(conversation.chat_template_kwargs_json) == {"a": 1}
    assert not conversation.add_generation_prompt


def test_base64_with_line_breaks_or_escapes_is_read() -> None:
    encoded = base64.b64encode(PIXEL).decode()
    for url in (
        DATA_URL[:40] + "\n" + DATA_URL[40:],
        "data:;base64," + encoded.replace("=", "%3D"),
    ):
        request = read_chat(chat(**image(url)), model())
        assert request.prepare.conversation.messages[0].content[0].image.data == PIXEL


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_completions_take_one_text(prompt: Any) -> None:
    request = read_completion({"prompt": prompt, "echo": True}, model())
    assert request.prepare.text == "hi"
    assert request.reply.prompt_text == "hi"


@pytest.mark.parametrize("prompt", [[3, 4], [[3, 4]]])
def test_completions_take_token_ids(prompt: Any) -> None:
    request = read_completion({"prompt": prompt, "echo": True}, model())
    assert decode_tokens(request.prepare.token_ids) == [3, 4]
    assert request.reply.prompt_text == "xx"


@pytest.mark.parametrize(
    "prompt", [None, [], ["a", "b"], [[1], [2]], [480], [-1], [1.5], {}, [""] * 2]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_completion({"prompt": prompt}, model())
    assert caught.value.metadata["field"].startswith("prompt")


def test_the_cost_bound_holds_for_text_and_pictures() -> None:
    tokenizer = byte_level_tokenizer()
    request = read_chat(chat(max_tokens=10), model())
    assert len(tokenizer.encode("user: hello").ids) + 10 <= request.cost_bound(model()) <= 512
    assert read_chat(chat(**image(DATA_URL)), model()).cost_bound(model()) == 512


def prepared(count: int) -> PrepareResponse:
    return PrepareResponse(token_ids=encode_tokens(range(count)))


def spec_of(count: int, **body: Any) -> Any:
    request = read_chat(chat(**body), model())
    return make_spec(
        request, prepared(count), model(), request_id="r", tenant="t", created_unix_s=1
    )


def test_max_tokens_defaults_to_what_is_left_of_the_length() -> None:
    assert spec_of(100).sampling.max_tokens == 412
    assert spec_of(511).sampling.max_tokens == 1
    assert spec_of(100, max_tokens=412).sampling.max_tokens == 412


@pytest.mark.parametrize(("count", "body"), [(100, {"max_tokens": 413}), (512, {})])
def test_prompt_and_answer_must_fit_together(count: int, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="512") as caught:
        spec_of(count, **body)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        spec_of(0)
