"""Which bodies OpenAI's API accepts and refuses, and how errors name the field."""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from google.protobuf.json_format import MessageToDict

from services.gateway.api.openai import requests
from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.unsupported import UnsupportedFields
from services.gateway.reading.media.data_urls import serialized
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest, NotFound
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tests.support.gateway.served_model import model
from tests.support.gateway.stage import MODEL, Stage
from tests.support.tokenizers import byte_level_tokenizer

PIXEL = b"\x89PNG-like bytes"
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()


async def as_sent(prompt: PrepareRequest) -> PrepareRequest:
    """A prompt as preprocess gets it."""
    return PrepareRequest.FromString(await serialized(prompt))


def read_chat(body: Mapping[str, Any], served: ServedModel) -> ValidRequest:
    return requests.read_chat(decode(json.dumps(body).encode(), ChatRequest), served)


def chat(**body: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **body}


def image(url: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": url}
    return {"messages": [{"role": "user", "content": [part]}]}


def video(url: Any) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": url}
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
    ({"seed": -(1 << 63) - 1}, "seed"),
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
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 200}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"use_beam_search": 1}, "use_beam_search"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "top_k": 5}, "top_k"),
    ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
    ({"use_beam_search": True, "stop": "x", "min_tokens": 2}, "min_tokens"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "late"}, "early_stopping"),
    ({"early_stopping": "never"}, "early_stopping"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [480]}, "allowed_token_ids[0]"),
    ({"bad_token_ids": [1, -1]}, "bad_token_ids[1]"),
    ({"bad_words": [3]}, "bad_words[0]"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x", "   "]}, "bad_words[1]"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5, **image(DATA_URL)}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5, **video("https://x/a")}, "truncate_prompt_tokens"),
    ({"priority": 1001}, "priority"),
    ({"priority": "high"}, "priority"),
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
    ({"chat_template_kwargs": {"a": float("nan")}}, "chat_template_kwargs.a"),
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
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
    ),
    (image(None), "messages[0].content[0].image_url"),
    (image({}), "messages[0].content[0].image_url.url"),
    (image({"url": DATA_URL, "detail": "huge"}), "messages[0].content[0].image_url.detail"),
    (image("ftp://example.org/a"), "messages[0].content[0].image_url"),
    (image("data:image/png;base64"), "messages[0].content[0].image_url"),
    (image("data:image/png;base64,"), "messages[0].content[0].image_url"),
    (image("data:image/png;base64,@@@@"), "messages[0].content[0].image_url"),
    (image("data:text/html;base64,AAAA"), "messages[0].content[0].image_url"),
    (image("https://x/" + "y" * 9000), "messages[0].content[0].image_url"),
    (image("data:video/jpeg;base64,AAAA"), "messages[0].content[0].image_url"),
    (video(None), "messages[0].content[0].video_url"),
    (video({}), "messages[0].content[0].video_url.url"),
    (video("ftp://example.org/a"), "messages[0].content[0].video_url"),
    (video("data:video/jpeg,AAAA"), "messages[0].content[0].video_url"),
    (video("data:video/jpeg;base64,AAAA,,AAAA"), "messages[0].content[0].video_url"),
    (video("data:video/mp4;base64,@@@@"), "messages[0].content[0].video_url"),
    (video("data:text/html;base64,AAAA"), "messages[0].content[0].video_url"),
    (
        video({"url": "https://x/a.mp4", "seconds_per_frame": 1}),
        "messages[0].content[0].video_url",
    ),
    (
        video({"url": "data:video/jpeg;base64,AAAA", "seconds_per_frame": -1}),
        "messages[0].content[0].video_url.seconds_per_frame",
    ),
]

UNSUPPORTED: list[dict[str, Any]] = [
    {"echo": True},
    {"logits_processors": ["x"]},
    {"modalities": ["audio"]},
    {"chat_template": "{{ x }}"},
]

# What is refused, and what its error says besides its name.
SAYS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"echo": True}, ("for completions", "false")),
    ({"modalities": ["text", "audio"]}, ("text alone", '["text"]')),
    ({"audio": {"voice": "x"}}, ("text alone", "leave it out")),
    ({"suffix": "end"}, ("`prompt`", 'send ""')),
    ({"prompt_embeds": "AAAA"}, ("token ids",)),
    ({"chat_template": "{{ x }}"}, ("--chat-template",)),
    ({"tool_choice": "required"}, ("`tools`",)),
    ({"tool_choice": "x"}, ('"auto"', '"required"')),
    ({"functions": [{"name": "x"}]}, ("`tools`",)),
    ({"function_call": {"name": "x"}}, ("`tools`",)),
    ({"logits_processors": ["x"]}, ("[]",)),
    ({"mm_processor_kwargs": 1}, ("an object",)),
    ({"media_io_kwargs": {"video": "x" * 20_000}}, ("16384 bytes",)),
    ({"web_search_options": {}}, ("leave it out",)),
    ({"logprobs": 5}, ("true or false", "top_logprobs")),
    ({"top_logprobs": 5}, ("logprobs to be true",)),
    ({"service_tier": "best"}, ("auto", "flex", "'best'")),
    ({"allowed_token_ids": []}, ("leave it out",)),
    ({"logit_bias": {"x": 1}}, ("keys must be token ids",)),
]

HARMLESS: list[dict[str, Any]] = [
    {"n": 2, "temperature": 0, "best_of": 3},
    {"use_beam_search": True, "temperature": 1, "top_p": 1.0, "top_k": -1, "logit_bias": {}},
    {"length_penalty": 1.0, "early_stopping": False, "service_tier": "flex"},
    {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}},
    {"n": None, "tools": None, "tool_choice": "none", "top_logprobs": 0, "logprobs": None},
    {"store": True, "metadata": {"a": "b"}, "reasoning_effort": "low", "parallel_tool_calls": True},
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda v: str(v)[:40])
async def test_bad_values_name_their_field(change: Mapping[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await serialized(read_chat(chat(**change), model()).prepare)
    assert caught.value.metadata["field"] == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("change", UNSUPPORTED, ids=str)
def test_what_is_not_offered_is_refused_by_name(change: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_chat(chat(**change), model())
    assert caught.value.reason == "UNSUPPORTED_PARAMETER"
    assert caught.value.metadata["field"] == next(iter(change))


@pytest.mark.parametrize(("change", "words"), SAYS, ids=lambda value: str(value)[:40])
async def test_a_refused_field_says_what_is_taken(
    stage: Stage, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        messages: Any = chat()["messages"]
        await stage.openai.chat.completions.create(
            model=MODEL, messages=messages, extra_body=change
        )
    (field,) = change
    body: Any = caught.value.body
    assert caught.value.param == field and caught.value.code
    assert body["message"].startswith(f"{field} ")
    assert all(word in body["message"] for word in words)
    assert not stage.preprocess.seen


def test_the_document_lists_every_field_that_is_refused() -> None:
    document = Path(__file__).parents[3] / "docs" / "api.md"
    _, _, behind = document.read_text(encoding="utf-8").partition(
        "\n### Fields that are not offered\n"
    )
    listed = behind.partition("\n### ")[0]
    assert set(UnsupportedFields.__struct_fields__) <= set(re.findall(r"`(\w+)`", listed))


def test_every_seed_of_64_bits_is_taken() -> None:
    seeds = [0, 7, -2, -7, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1]
    taken = [read_chat(chat(seed=seed), model()).sampling.seed for seed in seeds]
    assert taken == [seed % (1 << 64) for seed in seeds]
    drawn = {read_chat(chat(seed=-1), model()).sampling.seed for _ in range(3)}
    assert len(drawn) == 3  # as in vLLM: none given


@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_values_that_mean_off_and_unknown_fields_are_accepted(change: Mapping[str, Any]) -> None:
    read_chat(chat(**change), model())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe{}", b'"x"', b"[" * 100_000, b'{"seed":07}', b'{"a":1}}'],
)
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, ChatRequest)
    assert caught.value.reason == "INVALID_JSON"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"seed":' + b"9" * 9000 + b"}", "seed"),
        (b'{"messages":[{"role":7}]}', "messages[0].role"),
        (b'{"messages":[{"content":[{"type":"text","text":[]}]}]}', "messages[0].content[0].text"),
        (b'{"logit_bias":{"3":"much"}}', "logit_bias[...]"),
        (b'{"metadata":{"a":[1,NaN]}}', "metadata.a[1]"),
        (b'{"metadata":{"\\ud800":1}}', "metadata"),
    ],
)
def test_values_that_cannot_be_decoded_name_their_field(body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, ChatRequest)
    assert caught.value.metadata["field"] == field
    assert caught.value.message.startswith(field)


def test_a_wrong_type_says_what_it_may_be_and_what_it_is() -> None:
    for change, text in (
        ({"n": "2"}, "n must be a whole number, not a string"),
        ({"temperature": True}, "temperature must be a number, not a boolean"),
        ({"stream": 1}, "stream must be true or false, not a number"),
        ({"n": 1.5}, "n must be a whole number, not 1.5"),
        ({"user": ["x"]}, "user must be a string, not a list"),
        ({"stop": {}}, "stop must be a string or a list, not an object"),
        ({"stop": ["a", None]}, "stop[1] must be a string, not null"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read_chat(chat(**change), model())
        assert caught.value.message == text
        assert caught.value.reason == "INVALID_TYPE"


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert decode(b'\xef\xbb\xbf{"user":"ada"}', ChatRequest).user == "ada"


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


def test_every_sampling_field_reaches_the_scheduler() -> None:
    body: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 2, "seed": 9, "max_tokens": 7,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [6], "stop": ["a", "b"],
        "include_stop_str_in_output": True, "n": 2, "best_of": 3, "logprobs": True,
        "top_logprobs": 4, "prompt_logprobs": 5, "logit_bias": {"7": -100},
        "allowed_token_ids": [3, 4], "bad_token_ids": [8],
    }  # fmt: skip
    request = read_chat(chat(**body, priority=-3), model())
    sampling = MessageToDict(request.sampling, preserving_proto_field_name=True)
    for name, value in {**body, "logprobs": 4, "seed": "9"}.items():
        if name != "top_logprobs":
            assert sampling[name] == value, name
    assert request.priority == -3


def test_beams_take_no_defaults_that_they_cannot_keep() -> None:
    served = model(temperature=0.25, top_k=7.0, repetition_penalty=1.5)
    body = {"use_beam_search": True, "n": 2, "length_penalty": 0, "early_stopping": True}
    sampling = read_chat(chat(**body), served).sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0, 0, 1)
    assert (sampling.n, sampling.best_of, sampling.length_penalty) == (2, 2, 0)
    assert sampling.use_beam_search and sampling.early_stopping
    assert not sampling.early_stopping_never
    sampling = read_chat(chat(**{**body, "early_stopping": "never", "stop": "x"}), served).sampling
    assert sampling.early_stopping_never and not sampling.early_stopping
    assert list(sampling.stop) == ["x"]


def test_bad_words_are_spelled_as_the_model_would() -> None:
    tokenizer = byte_level_tokenizer()
    found = read_chat(chat(bad_words=["circle", " red", "zq"]), model()).sampling.bad_words
    sequences = [list(word.ids) for word in found]
    for word in ("circle", " circle", "red", " red", "zq"):
        ids = tokenizer.encode(word).ids
        if word.startswith(" ") and len(ids) != len(tokenizer.encode(word[1:]).ids):
            continue  # where a space is a token of its own, the bare spelling says it all
        assert ids in sequences, word
    assert len(sequences) == len({tuple(ids) for ids in sequences})


async def test_conversations_keep_their_order_and_images() -> None:
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
    prepare = await as_sent(read_chat(body, model()).prepare)
    conversation = prepare.conversation
    assert [message.role for message in conversation.messages] == ["system", "user", "assistant"]
    parts = conversation.messages[1].content
    assert [part.WhichOneof("part") for part in parts] == ["text", "media", "media", "text"]
    assert parts[1].media.data == PIXEL
    assert parts[1].media.field == "messages[1].content[1].image_url"
    assert parts[2].media.url == "https://example.org/a.png"
    assert conversation.messages[1].name == "Ada"
    assert json.loads(conversation.chat_template_kwargs_json) == {"a": 1}
    assert not conversation.add_generation_prompt


async def test_base64_with_line_breaks_or_escapes_is_read() -> None:
    encoded = base64.b64encode(PIXEL).decode()
    for url in (
        DATA_URL[:40] + "\n" + DATA_URL[40:],
        "data:;base64," + encoded.replace("=", "%3D"),
    ):
        sent = await as_sent(read_chat(chat(**image(url)), model()).prepare)
        assert sent.conversation.messages[0].content[0].media.data == PIXEL


async def test_videos_are_frames_or_files() -> None:
    encoded = base64.b64encode(PIXEL).decode()
    frames = f"data:video/jpeg;base64,{encoded},{encoded},{encoded}"
    expected = [
        (video(frames), (3, 0.0, b"", "")),
        (video({"url": frames, "seconds_per_frame": 0.25}), (3, 0.25, b"", "")),
        (video(f"data:video/mp4;base64,{encoded}"), (0, 0.0, PIXEL, "")),
        (video({"url": f"data:image/gif;base64,{encoded}"}), (0, 0.0, PIXEL, "")),
        (video("https://x/a.mp4"), (0, 0.0, b"", "https://x/a.mp4")),
    ]
    for body, (count, pace, data, url) in expected:
        prepare = await as_sent(read_chat(chat(**body), model()).prepare)
        found = prepare.conversation.messages[0].content[0].video
        assert [frame.data for frame in found.frames] == [PIXEL] * count
        assert (found.seconds_per_frame, found.file.data, found.file.url) == (pace, data, url)
        assert found.field == "messages[0].content[0].video_url"


def test_the_cost_bound_holds_for_text_and_pictures() -> None:
    tokenizer = byte_level_tokenizer()
    request = read_chat(chat(max_tokens=10), model())
    assert len(tokenizer.encode("user: hello").ids) + 10 <= request.cost_bound(model()) <= 512
    assert read_chat(chat(**image(DATA_URL)), model()).cost_bound(model()) == 512
