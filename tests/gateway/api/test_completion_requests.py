"""Bodies of /v1/completions become requests."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from services.gateway.api.openai import requests
from services.gateway.api.openai.schema import ChatRequest, CompletionRequest
from services.gateway.decoding.decode import decode
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from shared.queue.token_log import decode_tokens
from tests.support.gateway.served_model import model


def read_completions(body: Mapping[str, Any], served: ServedModel) -> list[ValidRequest]:
    return requests.read_completions(decode(json.dumps(body).encode(), CompletionRequest), served)


def read_completion(body: Mapping[str, Any], served: ServedModel) -> ValidRequest:
    (request,) = read_completions(body, served)
    return request


@pytest.mark.parametrize(
    ("change", "kept"),
    [({}, 0), ({"truncate_prompt_tokens": 9}, 9), ({"truncate_prompt_tokens": -1}, 511)],
)
def test_how_much_of_a_prompt_is_kept(change: dict[str, Any], kept: int) -> None:
    long = "word " * 999
    request = read_completion({"prompt": long, **change}, model())
    assert request.prepare.keep_last_tokens == kept
    assert request.prompt_bound == (kept or len(long) + 64)
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"messages": messages, "max_tokens": 100, **change}).encode()
    chat = requests.read_chat(decode(body, ChatRequest), model())
    assert chat.prepare.keep_last_tokens == (412 if kept == 511 else kept)
    ids = read_completion({"prompt": list(range(30)), **change}, model()).prepare
    assert decode_tokens(ids.token_ids) == list(range(30))[-kept:]
    assert not ids.keep_last_tokens
    with pytest.raises(InvalidRequest, match="cannot be combined with echo"):
        read_completion({"prompt": [3], "truncate_prompt_tokens": 9, "echo": True}, model())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"logprobs": 3}, (3, None, None)),
        ({"logprobs": 0, "echo": True}, (0, 0, None)),
        ({"prompt_logprobs": 2}, (None, 2, 2)),
        ({"logprobs": 4, "echo": True, "prompt_logprobs": 2}, (4, 4, 2)),
        ({}, (None, None, None)),
    ],
)
def test_completions_ask_for_log_probabilities_by_number(
    body: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    request = read_completion({"prompt": "x", **body}, model())
    sampling, reply = request.sampling, request.reply
    found = (
        sampling.logprobs if sampling.HasField("logprobs") else None,
        sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        reply.prompt_logprobs if reply.HasField("prompt_logprobs") else None,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_bad_completions_name_their_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_completion({"prompt": "x", **body}, model())
    assert caught.value.metadata["field"] == field


def test_scoring_a_prompt_alone_costs_one_token() -> None:
    request = read_completion({"prompt": [3, 4], "max_tokens": 0, "echo": True}, model())
    assert request.reply.prompt_only and request.sampling.max_tokens == 1
    assert not read_completion({"prompt": [3], "echo": True}, model()).reply.prompt_only


def test_the_cost_bound_counts_candidates() -> None:
    request = read_completion({"prompt": [3, 4], "max_tokens": 10, "best_of": 5}, model())
    assert request.cost_bound(model()) == 2 + 5 * 10


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_completions_take_one_text(prompt: Any) -> None:
    (request,) = read_completions({"prompt": prompt, "echo": True}, model())
    assert request.prepare.text == "hi"
    assert request.reply.prompt_text == "hi"


@pytest.mark.parametrize("prompt", [[3, 4], [[3, 4]]])
def test_completions_take_token_ids(prompt: Any) -> None:
    (request,) = read_completions({"prompt": prompt, "echo": True}, model())
    assert decode_tokens(request.prepare.token_ids) == [3, 4]
    assert request.reply.prompt_text == "xx"


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], ["a", 3], ["a", {}], [[1], [480]], [480], [-1], [1.5], {}]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_completions({"prompt": prompt}, model())
    assert caught.value.metadata["field"].startswith("prompt")


def test_a_text_marks_the_places_of_its_media() -> None:
    data = {"image": ["/a b.png", "https://example.org/b.png"], "video": "/c.gif"}
    body = {"prompt": "one <image>", "multi_modal_data": data, "echo": True}
    request = read_completion(body, model())
    conversation = request.prepare.conversation
    assert conversation.as_prompt and conversation.marks_media
    *media, words = conversation.messages[0].content
    assert [part.media.url for part in media[:2]] == ["file:///a%20b.png", data["image"][1]]
    assert media[2].video.file.url == "file:///c.gif"
    assert words.text == request.reply.prompt_text == "one <image>"
    assert media[1].media.field == "multi_modal_data.image[1]"
    plain = read_completion({"prompt": "one", "multi_modal_data": {}}, model())
    assert plain.prepare.text == "one"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [1, 2]}, "multi_modal_data"),
        ({"prompt": ["a", "b"]}, "multi_modal_data"),
        ({"multi_modal_data": {"image": ["a.png"]}}, "multi_modal_data.image[0]"),
        ({"multi_modal_data": {"audio": "/a.wav"}}, "multi_modal_data"),
        ({"multi_modal_data": {"image": 3}}, "multi_modal_data.image"),
    ],
)
def test_media_that_are_not_taken_name_their_field(body: dict[str, Any], field: str) -> None:
    given = {"prompt": "x", "multi_modal_data": {"image": "/a.png"}, **body}
    with pytest.raises(InvalidRequest) as caught:
        read_completion(given, model())
    assert caught.value.metadata["field"].startswith(field)


def test_a_window_bounds_what_a_prompt_may_cost() -> None:
    request = read_completion({"prompt": "word " * 99, "max_window_size": 50}, model())
    assert request.prepare.max_window_size == request.prompt_bound == 50
    assert not read_completion({"prompt": "x"}, model()).prepare.HasField("max_window_size")
    off = read_completion({"prompt": "x", "max_window_size": 0}, model())
    assert off.prepare.HasField("max_window_size") and off.prompt_bound > 0
    for change in ({"max_window_size": -1}, {"max_window_size": 1.5}):
        with pytest.raises(InvalidRequest, match="max_window_size"):
            read_completion({"prompt": "x", **change}, model())
    with pytest.raises(InvalidRequest, match="cannot be combined with max_window_size"):
        read_completion({"prompt": "x", "max_window_size": 9, "truncate_prompt_tokens": 3}, model())
