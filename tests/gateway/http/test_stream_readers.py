"""Streams as common readers take them: bare events for everybody, ids for those who ask for them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.timings import Timings
from shared.errors import InvalidRequest
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.network.sse import ASK_FOR_IDS, event_ids, events, texts_of
from tests.support.tokenizers import token_id

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
ROUTES = [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Here:"})]
SEVERAL = {"prompt": ["Here:", "There:"]}


class StrippingReader:
    """Does what `vllm bench serve` does with the pieces of a stream: strips each, splits what has
    gathered at empty lines, and takes a rest that is whole JSON for an event. Comments are left
    out, whatever stands in the same block.
    """

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of the events that this piece completes."""
        self._rest += piece.strip().decode()
        *blocks, self._rest = self._rest.split("\n\n")
        if self._rest.startswith("data: ") and _is_whole(self._rest.removeprefix("data: ")):
            blocks.append(self._rest)
            self._rest = ""
        for block in map(str.strip, blocks):
            if block and not block.startswith(":"):
                yield block.removeprefix("data: ")


def _is_whole(data: str) -> bool:
    try:
        return data == "[DONE]" or bool(json.loads(data))
    except ValueError:
        return False


@pytest.fixture
async def halting(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    """Is silent for so long, before the first token and between others, that comments bridge it."""

    async def pause(rid: str, index: int) -> None:
        await asyncio.sleep(0.4 if index in (0, 4) else 0.01)

    timings = Timings(reread_s=0.02, silence_s=0.05)
    async with open_stage(redis_url, model_folder, tokenizer, APIS, timings) as stage:
        stage.scheduler.step = pause
        yield stage


@pytest.mark.parametrize(("route", "body"), [*ROUTES, (COMPLETIONS, SEVERAL)])
async def test_a_plain_stream_is_data_and_nothing_else(
    stage: Stage, route: str, body: dict[str, Any]
) -> None:
    reply = await stage.http.post(route, json={**body, "stream": True})
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert set(texts_of(events(reply.text)).values()) == {ANSWER}


@pytest.mark.parametrize(
    ("headers", "has_ids"),
    [
        ({"X-Tessera-Event-Ids": "1"}, True),
        ({"X-Tessera-Resume": "30"}, True),
        ({"Idempotency-Key": "a"}, True),
        ({"X-Tessera-Resume": "0"}, False),
        ({"X-Tessera-Event-Ids": "0"}, False),
        ({"Idempotency-Key": "b", "X-Tessera-Event-Ids": "0"}, False),
    ],
)
@pytest.mark.parametrize(("route", "body"), [ROUTES[0], (COMPLETIONS, SEVERAL)])
async def test_events_have_ids_only_where_they_are_asked_for(
    stage: Stage, route: str, body: dict[str, Any], headers: dict[str, str], has_ids: bool
) -> None:
    reply = await stage.http.post(route, json={**body, "stream": True}, headers=headers)
    assert len(event_ids(reply.text)) == (len(events(reply.text)) if has_ids else 0)


async def test_a_resumed_stream_has_ids(stage: Stage) -> None:
    rid = (await stage.chat(stream=True)).headers["x-request-id"]
    rest = await stage.http.get(f"/v1/requests/{rid}/stream")
    assert len(event_ids(rest.text)) == len(events(rest.text))


async def test_another_wish_for_ids_is_refused(stage: Stage) -> None:
    stage.http.headers["X-Tessera-Event-Ids"] = "yes"
    reply = await stage.chat(stream=True)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "X-Tessera-Event-Ids")


@pytest.mark.parametrize(("route", "body"), [*ROUTES, (COMPLETIONS, SEVERAL)])
async def test_a_reader_that_strips_pieces_loses_nothing_to_silence(
    halting: Stage, route: str, body: dict[str, Any]
) -> None:
    reader, pings = StrippingReader(), 0
    found: list[str] = []
    async with halting.http.stream("POST", route, json={**body, "stream": True}) as reply:
        async for piece in reply.aiter_bytes():
            pings += piece.count(b": ping")
            found += reader.feed(piece)
    assert pings > 2 and found.pop() == "[DONE]"
    assert set(texts_of([json.loads(data) for data in found]).values()) == {ANSWER}


async def test_such_a_reader_sees_the_error_behind_silence(halting: Stage) -> None:
    special = token_id(halting.tokenizer, "<|im_start|>")  # an event has nothing to tell of it
    halting.scheduler.answer = lambda spec: [[special]]
    halting.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    reader, found = StrippingReader(), list[str]()
    body = {"prompt": "Here:", "stream": True}
    async with halting.http.stream("POST", COMPLETIONS, json=body) as reply:
        async for piece in reply.aiter_bytes():
            found += reader.feed(piece)
    assert json.loads(found[-1])["error"]["code"] == "bad_luck"


@pytest.mark.parametrize("headers", [{}, ASK_FOR_IDS])
async def test_the_openai_client_sees_no_events_in_silence(
    halting: Stage, headers: dict[str, str]
) -> None:
    body = {"messages": MESSAGES, "stream": True}
    raw = await halting.http.post(CHAT, json=body, headers=headers)
    assert raw.text.count(": ping") > 2
    chat = await halting.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_headers=headers
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
    completion = await halting.openai.completions.create(
        model=MODEL, prompt="Here:", stream=True, extra_headers=headers
    )
    assert text == "".join([chunk.choices[0].text async for chunk in completion]) == ANSWER


PARTED = "one\u2028two\u2029three\u0085four"
PROMPTED = {"inputs": "Hi", "parameters": {}}
STREAMS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "stream": True},
    COMPLETIONS: {"prompt": "Here:", "stream": True, "echo": True},
    "/v1/responses": {"input": "Hi", "stream": True},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 99, "stream": True},
    "/generate_stream": PROMPTED,
    "/infer": {**PROMPTED, "stream": True},
    f"/v2/models/{MODEL}/generate_stream": {"text_input": "Hi", "max_tokens": 99},
    "/generate": {"prompt": "Hi", "stream": True, "max_tokens": 99},
    "/api/chat": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_no_character_of_an_answer_ends_a_line(stage: Stage, path: str) -> None:
    """Readers that use `str.splitlines`, as httpx does, find the lines that were written."""
    stage.says(PARTED)
    reply = await stage.http.post(path, json=STREAMS[path])
    assert reply.status_code == 200, reply.text
    assert reply.text.splitlines() == reply.text.split("\n")[:-1]
    said = "".join(
        text
        for line in reply.text.splitlines()
        if "{" in line
        for text in _texts(json.loads(line[line.index("{") :]))
    )
    assert set(PARTED) - set(said) == set()


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)
