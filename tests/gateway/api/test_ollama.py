"""Ollama's API: its own client, its lines, its errors, and streams that go on elsewhere."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from services.gateway.api.ollama import models
from services.gateway.decoding.decode import decode
from services.gateway.gateway import Gateway
from services.gateway.reading.constraint import LONGEST
from shared.errors import InvalidRequest
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.stage import ANSWER, MAX_MODEL_LEN, MODEL, Stage, open_stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS
from tests.support.pictures import png

CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": MESSAGES},
    GENERATE: {"model": MODEL, "prompt": "What is there?"},
}
TOOL: Any = {"type": "function", "function": {"name": "count"}}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")

# Bodies, and what the error begins with.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": MESSAGES, "options": {"wings": 2}}, "options.wings"),
    (CHAT, {"messages": MESSAGES, "options": {"mirostat": 2}}, "options.mirostat"),
    (
        CHAT,
        {"messages": MESSAGES, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
        "options.repeat_last_n",
    ),
    (CHAT, {"messages": MESSAGES, "options": {"typical_p": 0.5}}, "options.typical_p"),
    (CHAT, {"messages": MESSAGES, "options": {"num_predict": 0}}, "options.num_predict"),
    (CHAT, {"messages": MESSAGES, "options": {"num_ctx": 0}}, "options.num_ctx"),
    (
        CHAT,
        {"messages": MESSAGES, "options": {"penalize_newline": False}},
        "options.penalize_newline",
    ),
    (CHAT, {"messages": MESSAGES, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    (CHAT, {"messages": MESSAGES, "options": {"temperature": -1}}, "options.temperature"),
    (CHAT, {"messages": MESSAGES, "options": {"stop": ["", "a"]}}, "options.stop"),
    (CHAT, {"messages": MESSAGES, "options": [1]}, "options"),
    (CHAT, {"messages": MESSAGES, "temperature": 1}, "temperature"),
    (CHAT, {"messages": MESSAGES, "format": "yaml"}, "format"),
    (CHAT, {"messages": MESSAGES, "format": True}, "format"),
    (CHAT, {"messages": MESSAGES, "format": ["json"]}, "format"),
    (GENERATE, {"prompt": "x", "format": {"a": "b" * (LONGEST + 1)}}, "format"),
    (GENERATE, {"prompt": "x", "format": {"uniqueItems": True}}, "format:"),
    (GENERATE, {"prompt": "x", "format": {"type": "bird"}}, "format:"),
    (CHAT, {"messages": MESSAGES, "think": True}, "think"),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL]}, "tools"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "shift": True}, "shift"),
    (GENERATE, {"prompt": "x", "truncate": True}, "truncate"),
    (CHAT, {"messages": MESSAGES, "keep_alive": "soon"}, "keep_alive"),
    (CHAT, {"messages": [{"role": "bird", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "images": ["%"]}]}, "messages[0].images[0]"),
    (CHAT, {"messages": [{"role": "user", "images": [""]}]}, "messages[0].images[0]"),
    (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix"),
    (GENERATE, {"prompt": "x", "template": "y"}, "template"),
    (GENERATE, {"prompt": "x", "context": [1, 2]}, "context"),
    (GENERATE, {"prompt": "x", "raw": True, "images": ["eA=="]}, "images"),
    (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "raw"),
    (GENERATE, {"prompt": ["x"]}, "prompt"),
    (GENERATE, {"prompt": "x", "images": "eA=="}, "images"),
    ("/api/show", {}, "model"),
]


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(stage.gateway.url, verify=False) as opened:
        yield opened


def text_of(line: dict[str, Any]) -> str:
    """The text of a line of either route."""
    text: str = line["message"]["content"] if "message" in line else line["response"]
    return text


def lines_of(stream: str) -> list[dict[str, Any]]:
    """The lines of a stream, of which each ends."""
    *lines, rest = stream.split("\n")
    assert rest == ""
    return [json.loads(line) for line in lines]


def without_durations(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in DURATIONS}


async def test_chats_of_the_ollama_client(stage: Stage, client: ollama.AsyncClient) -> None:
    ids = stage.says(ANSWER)
    whole = await client.chat(MODEL, MESSAGES)
    assert (whole.message.role, whole.message.content) == ("assistant", ANSWER)
    stream = await client.chat(MODEL, MESSAGES, stream=True)
    *parts, last = [part async for part in stream]
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert not any(part.done for part in parts) and last.message.content == ""
    for end in (whole, last):
        assert (end.model, end.done, end.done_reason) == (MODEL, True, "stop")
        assert end.created_at is not None and end.created_at.endswith("Z")
        assert end.eval_count == len(ids) and (end.prompt_eval_count or 0) > 0
        total, load, prompt, answer = (end[name] for name in DURATIONS)
        assert load == 0 and total >= prompt + answer > 0


async def test_generate_of_the_ollama_client(stage: Stage, client: ollama.AsyncClient) -> None:
    whole = await client.generate(MODEL, "What is there?", system="Be short.")
    assert (whole.response, whole.done_reason) == (ANSWER, "stop")
    spoken = [(m.role, m.content[0].text) for m in stage.preprocess.seen[-1].conversation.messages]
    assert spoken == [("system", "Be short."), ("user", "What is there?")]
    stream = await client.generate(MODEL, "What is there?", raw=True, stream=True)
    assert "".join([part.response or "" async for part in stream]) == ANSWER
    assert stage.preprocess.seen[-1].text == "What is there?"


async def test_pictures_stand_before_the_text(stage: Stage, client: ollama.AsyncClient) -> None:
    picture = png(3)
    turn = {"role": "user", "content": "What is there?", "images": [picture]}
    await client.chat(MODEL, [turn])
    await client.generate(MODEL, "What is there?", images=[picture])
    for request in stage.preprocess.seen[-2:]:
        [message] = request.conversation.messages
        first, second = message.content
        assert (first.media.data, second.text) == (picture, "What is there?")
        assert not message.is_string


async def test_options_have_ollamas_names(stage: Stage, client: ollama.AsyncClient) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 11, "stop": ["x"],
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.75, "num_ctx": MAX_MODEL_LEN,
        "repeat_last_n": -1, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": None,
        "tfs_z": 1.0, "typical_p": 1, "num_gpu": 2, "num_thread": 4,
    }  # fmt: skip
    await client.chat(MODEL + ":latest", MESSAGES, options=options, keep_alive="5m", think=False)
    [played] = stage.scheduler.played.values()
    sampling = played.spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 3)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.25, 0.125, 11)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert (sampling.frequency_penalty, list(sampling.stop)) == (0.75, ["x"])
    template = stage.preprocess.seen[-1].conversation.chat_template_kwargs_json
    assert json.loads(template) == {"enable_thinking": False}
    reply = await client.generate(MODEL, "What is there?", options={"num_predict": -1})
    assert reply.response == ANSWER


async def test_lengths_of_clients_own_mean_all_there_is(
    stage: Stage, client: ollama.AsyncClient
) -> None:
    """Clients set them for whatever model they meet."""
    options = {"num_ctx": 1 << 20, "num_predict": 1 << 20, "f16_kv": True, "penalize_newline": True}
    await client.chat(MODEL, MESSAGES, options=options)
    await client.generate(MODEL, "What is there?", raw=True, options=options)
    for played, request in zip(stage.scheduler.played.values(), stage.preprocess.seen, strict=True):
        prompt = len(played.spec.prompt) // 4
        assert played.spec.sampling.max_tokens == MAX_MODEL_LEN - prompt
        assert not request.HasField("max_window_size")
    reply = await stage.http.post(CHAT, json=BODIES[CHAT] | {"truncate": True})
    assert reply.status_code == 200
    assert stage.preprocess.seen[-1].max_window_size == MAX_MODEL_LEN


async def test_the_last_tokens_count_where_there_is_no_penalty(
    stage: Stage, client: ollama.AsyncClient
) -> None:
    """Ollama's own default, 64, comes from clients that send all options; 0 is no penalty."""
    await client.chat(MODEL, MESSAGES, options={"repeat_last_n": 64, "repeat_penalty": 1.0})
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1}
    await client.chat(MODEL, MESSAGES, options={"repeat_last_n": 0, **penalties})
    for played in stage.scheduler.played.values():
        sampling = played.spec.sampling
        assert sampling.repetition_penalty == 1
        assert sampling.presence_penalty == sampling.frequency_penalty == 0


async def test_format_holds_the_answer_to_json(stage: Stage, client: ollama.AsyncClient) -> None:
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts
    await client.chat(MODEL, MESSAGES, format="json")
    await client.generate(MODEL, "What is there?", format="json")
    any_object = [played.spec.sampling.grammar for played in stage.scheduler.played.values()]
    for grammar in any_object:
        assert accepts(grammar, '{"b": []}') and not accepts(grammar, "[]")
    stage.scheduler.played.clear()
    await client.chat(MODEL, MESSAGES, format=SCHEMA)
    assert [part async for part in await client.chat(MODEL, MESSAGES, format=SCHEMA, stream=True)]
    await client.generate(MODEL, "What is there?", format=SCHEMA)
    of_schema = [played.spec.sampling.grammar for played in stage.scheduler.played.values()]
    assert (len(any_object), len(of_schema)) == (2, 3)
    for grammar in of_schema:
        assert accepts(grammar, '{"a": 1}')
        assert not accepts(grammar, '{"a": "1"}') and not accepts(grammar, '{"a": 1, "b": 2}')
    reply = await stage.http.post(CHAT, json=BODIES[CHAT] | {"format": ""})
    assert reply.status_code == 200
    assert [*stage.scheduler.played.values()][-1].spec.sampling.grammar == ""


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_replies_are_streams_unless_stream_is_false(stage: Stage, path: str) -> None:
    reply = await stage.http.post(path, json=BODIES[path])
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = lines_of(reply.text)
    assert "".join(map(text_of, lines)) == ANSWER
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert not any("event_id" in line for line in lines), "ids come where they are asked for"
    whole = await stage.http.post(path, json=BODIES[path] | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert text_of(whole.json()) == ANSWER


async def test_what_is_not_offered_is_refused_by_its_name(stage: Stage) -> None:
    for path, body, name in REFUSED:
        reply = await stage.http.post(path, json=body)
        error = reply.json()
        assert reply.status_code == 400 and set(error) == {"error"}
        assert error["error"].startswith(f"{name} "), error
    assert not stage.scheduler.played


async def test_garbage_is_a_400(stage: Stage) -> None:
    headers = {"content-type": "application/json"}
    garbage = (
        *(b"", b"[]", b"{", b"\xff", b"null", b'{"model": 5}', b"[" * 9999),
        *(b'{"options": {"seed": 1e999}}', b'{"messages": [{"content": "\\ud800"}]}'),
    )
    for path in (CHAT, GENERATE, "/api/show"):
        for body in garbage:
            reply = await stage.http.post(path, content=body, headers=headers)
            assert reply.status_code == 400, body
            assert isinstance(reply.json()["error"], str)


async def test_a_large_body_about_a_model_is_read_in_a_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered meanwhile."""
    readers: list[threading.Thread] = []

    def decoding(content: bytes, kind: Any) -> Any:
        readers.append(threading.current_thread())
        return decode(content, kind)

    monkeypatch.setattr(models, "decode", decoding)
    content = json.dumps({"model": MODEL, "system": "x" * 500_000}).encode()
    reply = await stage.http.post(
        "/api/show", content=content, headers={"content-type": "application/json"}
    )
    assert reply.status_code in (200, 400), reply.text
    assert len(readers) == 1 and readers[0] is not threading.current_thread()


async def test_errors_of_the_ollama_client(stage: Stage, client: ollama.AsyncClient) -> None:
    for call in (client.chat("other", MESSAGES), client.generate("other"), client.show("other")):
        with pytest.raises(ollama.ResponseError) as caught:
            await call
        assert (caught.value.status_code, caught.value.error) == (404, "model 'other' not found")
    with pytest.raises(ollama.ResponseError, match="/api/pull is not offered") as caught:
        await client.pull(MODEL)
    assert caught.value.status_code == 404
    assert (await stage.http.get(CHAT)).status_code == 405
    assert isinstance((await stage.http.get("/api/nowhere")).json()["error"], str)
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("The red").ids]
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    text = ""
    with pytest.raises(ollama.ResponseError, match="it broke"):
        async for part in await client.chat(MODEL, MESSAGES, stream=True):
            text += part.message.content or ""
    assert text == "The red"


async def test_a_request_for_no_tokens_has_the_model_loaded(
    stage: Stage, client: ollama.AsyncClient
) -> None:
    chat, generated = await client.chat(MODEL, []), await client.generate(MODEL, keep_alive=0)
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    assert (generated.done, generated.done_reason, generated.response) == (True, "load", "")
    assert not stage.scheduler.played


async def test_what_is_served(stage: Stage, client: ollama.AsyncClient) -> None:
    [listed] = (await client.list()).models
    assert listed.model == MODEL and listed.details is not None
    assert listed.size == 0, "this checkpoint has no weights"
    [running] = (await client.ps()).models
    # Ollama's own program shows its first twelve characters.
    assert len(listed.digest or "") == 64 and running.digest == listed.digest
    assert (running.model, running.context_length) == (MODEL, MAX_MODEL_LEN)
    shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "vision"]
    assert shown.parameters == "top_k 20"
    kind = (shown.modelinfo or {})["general.architecture"]
    assert kind == "LlavaForConditionalGeneration"
    assert (shown.modelinfo or {})[f"{kind}.context_length"] == MAX_MODEL_LEN
    of_all = (await stage.http.get("/version")).json()
    assert (await stage.http.get("/api/version")).json() == of_all


async def test_bodies_as_ollamas_own_program_sends_them(stage: Stage) -> None:
    """It writes every field of what it asks, the empty ones too."""
    show = {
        "model": MODEL,
        "system": "",
        "template": "",
        "verbose": False,
        "options": None,
        "name": "",
    }
    reply = await stage.http.post("/api/show", json=show)
    assert reply.status_code == 200 and reply.json()["model_info"], reply.text
    for field, value in (("system", "x"), ("template", "x"), ("options", {"seed": 1})):
        refused = await stage.http.post("/api/show", json=show | {field: value})
        assert refused.status_code == 400 and refused.json()["error"].startswith(f"{field} ")
    load = {
        "model": MODEL,
        "prompt": "",
        "suffix": "",
        "system": "",
        "template": "",
        "options": None,
    }
    loaded = await stage.http.post(GENERATE, json=load | {"keep_alive": "5m0s"})
    assert loaded.json()["done_reason"] == "load"
    turns = [{"role": "user", "content": "What is there?"}]
    chat = {"model": MODEL, "messages": turns, "format": "", "options": {}, "keep_alive": "5m0s"}
    lines = lines_of((await stage.http.post(CHAT, json=chat)).text)
    assert "".join(map(text_of, lines)) == ANSWER


async def test_keys_are_asked_for(redis_url: str, model_folder: Any, tokenizer: Any) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="sesame") as stage:
        for path in (CHAT, "/api/tags"):
            method = "POST" if path == CHAT else "GET"
            reply = await stage.http.request(method, path, json=BODIES[CHAT])
            assert reply.status_code == 401 and isinstance(reply.json()["error"], str)
        headers = {"authorization": "Bearer sesame"}
        async with ollama.AsyncClient(stage.gateway.url, headers=headers, verify=False) as client:
            assert (await client.chat(MODEL, MESSAGES)).message.content == ANSWER


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_the_rest_after_every_line_at_another_gateway(
    stage: Stage, other: Gateway, path: str
) -> None:
    whole = lines_of((await stage.http.post(path, json=BODIES[path], headers=ASK_FOR_IDS)).text)
    rid = whole[0]["event_id"].partition("/")[0]
    wanted = [without_durations(line) for line in whole]
    async with plain_client(other.url, timeout=60) as client:
        for index, line in enumerate(whole):
            params = {"after": line["event_id"]}
            rest = await client.get(f"/v1/requests/{rid}/stream", params=params)
            assert rest.headers["content-type"] == "application/x-ndjson"
            found = lines_of(rest.text)
            if index < len(whole) - 1:
                assert "".join(map(text_of, found)) == "".join(map(text_of, whole[index + 1 :]))
                assert without_durations(found[-1]) == wanted[-1]
            else:
                assert found == []


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_stream_that_broke_off_after_any_token_goes_on_by_its_key(
    stage: Stage, other: Gateway, path: str
) -> None:
    stage.says("a stop here END", size=1)
    body = BODIES[path] | {"options": {"stop": ["END"]}}
    headers = {"Idempotency-Key": f"one {path}"}
    whole = lines_of((await stage.http.post(path, json=body, headers=headers)).text)
    async with plain_client(other.url, timeout=60) as client:
        for index, line in enumerate(whole[:-1]):
            again = headers | {"Last-Event-ID": line["event_id"]}
            found = lines_of((await client.post(path, json=body, headers=again)).text)
            assert "".join(map(text_of, found)) == "".join(map(text_of, whole[index + 1 :]))
            assert without_durations(found[-1]) == without_durations(whole[-1])
    assert len(stage.scheduler.played) == 1


async def test_a_client_that_leaves_cancels(stage: Stage) -> None:
    async def slowly(rid: str, index: int) -> None:
        await asyncio.sleep(0.02)

    stage.scheduler.step = slowly
    tokens = stage.tokenizer.encode("word").ids
    stage.scheduler.answer = lambda spec: (tokens for _ in range(400))
    async with stage.http.stream("POST", CHAT, json=BODIES[CHAT]) as broken:
        await anext(broken.aiter_lines())
    async with asyncio.timeout(60):
        while await stage.scheduler.queue.depth() != (0, 0) or len(stage.gateway.follower):
            await asyncio.sleep(0.01)
