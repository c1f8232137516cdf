"""An API brings frames, pings, errors and headers for keys of its own: streamed, broken off, resumed and refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.gateway import Gateway, open_gateway
from services.gateway.timings import Timings
from shared.errors import InvalidRequest
from tests.support.gateway.other_apis import LINES, NOTES, OVERLOADED, PING
from tests.support.gateway.stage import ANSWER, Stage, open_stage, until_ready
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, events

ALL = (*APIS, NOTES, LINES)
NOTE, LINE = "/notes", "/lines/write"
BODY = {"note": "What is there?", "stream": True}


@pytest.fixture
async def stage(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, timings: Timings
) -> AsyncIterator[Stage]:
    async with open_stage(redis_url, model_folder, tokenizer, ALL, timings) as opened:
        yield opened


@pytest.fixture
async def second(stage: Stage) -> AsyncIterator[Gateway]:
    """A second gateway with the same APIs on the same Redis."""
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2})
    async with open_gateway(settings, apis=ALL) as gateway:
        async with plain_client(gateway.url) as client:
            await until_ready(client)
        yield gateway


class Frame(NamedTuple):
    """A frame as it came, its event's id, its text."""

    raw: str
    event_id: str
    text: str


def frames(path: str, stream: str) -> list[Frame]:
    """A whole stream, taken apart: nothing is left over."""
    found = []
    for raw in stream.splitlines(keepends=True) if path == LINE else _blocks(stream):
        if path == LINE:
            content = json.loads(raw)
            place = content.get("at", "")
        else:
            fields = dict(line.split(": ", 1) for line in raw.splitlines() if line)
            content, place = json.loads(fields["data"]), fields.get("id", "")
            assert content["type"] == fields["event"]
        found.append(Frame(raw, place, content.get("text", "")))
    return found


def _blocks(stream: str) -> list[str]:
    *blocks, rest = stream.split("\n\n")
    assert rest == ""
    return [f"{block}\n\n" for block in blocks]


@pytest.mark.parametrize(
    ("path", "media_type", "last"),
    [
        (NOTE, "text/event-stream", 'event: end\ndata: {"type":"end","tokens":%d}\n\n'),
        (LINE, "application/x-ndjson", '{"done":true}\n'),
    ],
)
async def test_a_stream_has_the_frames_of_its_api(
    stage: Stage, path: str, media_type: str, last: str
) -> None:
    ids = stage.says(ANSWER)
    reply = await stage.http.post(path, json=BODY)
    assert (reply.status_code, reply.headers["content-type"]) == (200, media_type)
    found = frames(path, reply.text)
    assert "".join(frame.text for frame in found) == ANSWER
    assert found[-1].raw == (last % len(ids) if "%" in last else last)
    assert not any(frame.event_id for frame in found), "ids come where they are asked for"
    assert (found[0].raw.startswith("event: begin\n")) == (path == NOTE)


@pytest.mark.parametrize("path", [NOTE, LINE])
async def test_the_rest_after_every_frame_at_another_gateway(
    stage: Stage, second: Gateway, path: str
) -> None:
    whole = frames(path, (await stage.http.post(path, json=BODY, headers=ASK_FOR_IDS)).text)
    rid = whole[0].event_id.partition("/")[0]
    async with plain_client(second.url, timeout=60) as client:
        for index, frame in enumerate(whole[:-1]):
            rest = await client.get(f"/v1/requests/{rid}/stream", params={"after": frame.event_id})
            found = frames(path, rest.text)
            assert "".join(f.text for f in found) == "".join(f.text for f in whole[index + 1 :])
            assert found[-1].raw == whole[-1].raw
        everything = await client.get(f"/v1/requests/{rid}/stream")
        assert "".join(frame.text for frame in frames(path, everything.text)) == ANSWER
        if path == NOTE:  # the id of its replies names a request too
            same = await client.get(f"/v1/requests/note_{rid}/stream")
            assert same.text == everything.text


@pytest.mark.parametrize("path", [NOTE, LINE])
async def test_a_stream_that_broke_off_goes_on_by_its_key(
    stage: Stage, second: Gateway, path: str
) -> None:
    ids, go = stage.says(ANSWER), asyncio.Semaphore(3)

    async def step(rid: str, index: int) -> None:
        await go.acquire()

    stage.scheduler.step = step
    headers = {"Idempotency-Key": f"one {path}"}
    text, seen = "", list[Frame]()
    async with stage.http.stream("POST", path, json=BODY, headers=headers) as broken:
        async for piece in broken.aiter_text():
            text += piece
            with contextlib.suppress(ValueError, AssertionError):
                seen = frames(path, text)
            if seen and seen[-1].text:
                break
    for _ in ids:
        go.release()
    async with plain_client(second.url, timeout=60) as client:
        headers |= {"Last-Event-ID": seen[-1].event_id}
        rest = await client.post(path, json=BODY, headers=headers)
    assert "".join(frame.text for frame in [*seen, *frames(path, rest.text)]) == ANSWER


async def test_a_gateway_without_the_api_leaves_its_streams_to_others(
    stage: Stage, other: Gateway
) -> None:
    reply = await stage.http.post(NOTE, json=BODY)
    rid = reply.headers["x-request-id"]
    async with plain_client(other.url) as client:
        refused = await client.get(f"/v1/requests/{rid}/stream")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unknown_reply_kind")
        assert (await client.get(f"/v1/requests/{rid}")).json()["status"] == "completed"


@pytest.mark.parametrize("timings", [Timings(reread_s=0.02, silence_s=0.05)])
@pytest.mark.parametrize("path", [NOTE, LINE])
async def test_silence_is_bridged_as_the_form_has_it(stage: Stage, path: str) -> None:
    async def pause(rid: str, index: int) -> None:
        await asyncio.sleep(0.4 if index in (0, 4) else 0.0)

    stage.scheduler.step = pause
    reply = await stage.http.post(path, json=BODY)
    assert (reply.content.count(PING) > 2) == (path == NOTE)
    assert "\n: ping" not in reply.text and "\n\n\n" not in reply.text
    assert "".join(frame.text for frame in frames(path, reply.text)) == ANSWER


@pytest.mark.parametrize("path", [NOTE, LINE])
async def test_an_error_inside_a_stream_has_the_form_of_its_api(
    stage: Stage, second: Gateway, path: str
) -> None:
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("The red").ids]
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    reply = await stage.http.post(path, json=BODY)
    async with plain_client(second.url, timeout=60) as client:
        resumed = await client.get(f"/v1/requests/{reply.headers['x-request-id']}/stream")
    assert reply.status_code == resumed.status_code == 200
    last = {
        NOTE: 'event: error\ndata: {"type":"error","error":{"type":"bad_luck","message":"it broke"}}\n\n',
        LINE: '{"error":"it broke"}\n',
    }[path]
    for stream in (reply.text, resumed.text):
        assert stream.endswith(last)
        assert "".join(frame.text for frame in frames(path, stream)) == "The red"


def note_error(reply: httpx.Response) -> tuple[int, str]:
    assert reply.headers["content-type"] == "application/json"
    content = reply.json()
    assert content["type"] == "error" and set(content) == {"type", "error"}
    return reply.status_code, content["error"]["type"]


def line_error(reply: httpx.Response) -> tuple[int, str]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    content = json.loads(reply.text)
    assert set(content) == {"error"} and reply.text.endswith("\n")
    return reply.status_code, content["error"]


@pytest.mark.parametrize("timings", [Timings(preprocess_s=0.2)])
async def test_errors_before_a_stream_have_the_form_of_their_api(stage: Stage) -> None:
    bad = BODY | {"temperature": -1}
    assert note_error(await stage.http.post(NOTE, json=bad)) == (400, "invalid_value")
    status, message = line_error(await stage.http.post(LINE, json=bad))
    assert status == 400 and message.startswith("temperature must be")
    assert note_error(await stage.http.get(NOTE)) == (405, "method_not_allowed")
    assert note_error(await stage.http.post(f"{NOTE}/nowhere")) == (404, "no_such_route")
    assert line_error(await stage.http.post("/lines"))[0] == 404
    found = (await stage.http.post("/other")).json()["error"]
    assert found["code"] == "no_such_route", "OpenAI's, where it is no API's"
    await stage.preprocess.__aexit__(None)
    reply = await stage.http.post(NOTE, json=BODY)
    assert note_error(reply)[0] == OVERLOADED and reply.headers["retry-after"]


async def test_a_key_is_looked_for_where_the_api_has_it(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, ALL, api_key="sesame") as stage:
        bearer = {"authorization": "Bearer sesame"}
        for path, header in ((NOTE, {"x-api-key": "sesame"}), (LINE, {"x-line-key": "sesame"})):
            assert (await stage.http.post(path, json=BODY, headers=header)).status_code == 200
        assert (await stage.http.post(NOTE, json=BODY, headers=bearer)).status_code == 200
        reply = await stage.http.post(NOTE, json=BODY, headers={"x-api-key": "wrong"})
        assert note_error(reply) == (401, "invalid_api_key")
        named = "`X-Api-Key: <key>` or `Authorization: Bearer <key>`"
        assert named in reply.text and reply.headers["www-authenticate"] == "Bearer"
        reply = await stage.http.post(LINE, json=BODY, headers=bearer)
        assert line_error(reply) == (401, "send a valid API key as `X-Line-Key: <key>`")
        assert "www-authenticate" not in reply.headers
        reply = await stage.http.get("/v1/models", headers={"x-line-key": "sesame"})
        assert reply.status_code == 401


async def raw(stage: Stage, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to what a client sends as it is."""
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return head, body
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        ("/notes", b'{"type":"error","error":{"type":"invalid_http"'),
        ("/notes/?a=b", b'{"type":"error"'),
        ("http://here/notes", b'{"type":"error"'),
        ("/lines HTTP/x", b'{"error":"this is no valid HTTP request"}\n'),
        ("/lines/%77rite", b'{"error":"this is no valid HTTP request"}\n'),
        ("/v1/chat/completions", b'{"error": {"message": '),
        ("/", b'{"error": {"message": '),
    ],
)
async def test_what_is_no_http_is_refused_in_the_form_of_its_path(
    stage: Stage, path: str, begins: bytes
) -> None:
    request = f"POST {path} HTTP/1.1\r\nhost: here\r\nno header\r\n\r\n"
    head, body = await raw(stage, request.encode())
    assert head.startswith(b"HTTP/1.1 400 ") and body.startswith(begins)


async def test_without_a_path_what_is_no_http_is_refused_in_the_form_of_openai(
    stage: Stage,
) -> None:
    _, body = await raw(stage, b"\x00\x01\r\n\r\n")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    before = b"GET /notes HTTP/1.1\r\nhost: localhost\r\n\r\n"
    _, both = await raw(stage, before + b"\x00\x01\r\n\r\n")
    assert b'"code": "invalid_http"' in both, "the path of a request before is none"


async def test_a_body_that_is_too_large_is_refused_in_the_form_of_its_api(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(
        redis_url, model_folder, tokenizer, ALL, max_body_bytes=4096, max_header_bytes=4096
    ) as stage:
        large = BODY | {"note": " " * 8000}
        assert note_error(await stage.http.post(NOTE, json=large)) == (413, "body_too_large")
        assert line_error(await stage.http.post(LINE, json=large))[0] == 413
        reply = await stage.http.get(NOTE, headers={"x": "x" * 5000})
        assert note_error(reply) == (431, "headers_too_large")


async def test_apis_beside_each_other_do_not_share_forms(stage: Stage) -> None:
    chat = {"messages": [{"role": "user", "content": "What is there?"}], "stream": True}
    replies = await asyncio.gather(
        stage.http.post(NOTE, json=BODY),
        stage.http.post("/v1/chat/completions", json=chat),
        stage.http.post(LINE, json=BODY),
    )
    assert events(replies[1].text) and "event:" not in replies[1].text
    whole: dict[str, Any] = {"note": "What is there?"}
    assert (await stage.http.post(NOTE, json=whole)).json() == {"text": ANSWER}
