"""Paths: what a slash at the end means, and what is said where there is nothing."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.api.missing_routes import NOT_OFFERED
from tests.support.gateway.stage import ANSWER, MODEL, Stage

MESSAGES: Any = [{"role": "user", "content": "hello"}]
API = Path(__file__).parents[3] / "docs" / "api.md"


async def test_a_slash_at_the_end_means_nothing(stage: Stage) -> None:
    body = {"messages": MESSAGES}
    for end in ("", "/", "//"):
        reply = await stage.http.post(f"/v1/chat/completions{end}", json=body)
        assert reply.json()["choices"][0]["message"]["content"] == ANSWER
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/metrics", "/version"):
            reply = await stage.http.get(path + end)
            assert reply.status_code == 200 and not reply.history, path
    rid = (await stage.chat()).headers["x-request-id"]
    status = await stage.http.get(f"/v1/requests/{rid}/")
    assert status.json()["id"] == rid


async def test_a_slash_does_not_make_it_another_request(stage: Stage) -> None:
    body = {"messages": MESSAGES}
    paths = ("/v1/chat/completions", "/v1/chat/completions/")
    headers = {"idempotency-key": "one"}
    replies = [await stage.http.post(path, json=body, headers=headers) for path in paths]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["id"] == replies[1].json()["id"]


async def test_the_openai_client_learns_what_is_not_offered(stage: Stage) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await stage.openai.conversations.create()
    body: Any = caught.value.body
    assert (caught.value.code, caught.value.param) == ("route_not_offered", None)
    assert body["message"].startswith("/v1/conversations is not offered: ")
    assert "/v1/responses" in body["message"].partition(": ")[2]
    with pytest.raises(openai.NotFoundError, match="text alone"):
        await stage.openai.images.generate(model=MODEL, prompt="hello")


async def test_every_path_that_is_not_offered_says_so_and_the_document_lists_it(
    stage: Stage,
) -> None:
    listed = (
        API.read_text(encoding="utf-8")
        .partition("\n### Routes that are not offered\n")[2]
        .partition("\n#")[0]
    )
    assert set(NOT_OFFERED) <= set(re.findall(r"`(/[^`]*)`", listed))
    for path in NOT_OFFERED:
        for method, below in (("GET", ""), ("POST", "/one/two")):
            reply = await stage.http.request(method, path + below)
            assert reply.status_code == 404
            error = reply.json()["error"]
            if path.startswith(("/api/", "/v2/")):
                assert " is not offered: " in error, path
            elif path.startswith("/v1/messages/"):
                assert " is not offered: " in error["message"], path
            else:
                assert error["code"] == "route_not_offered", path


async def test_a_base_url_without_v1_or_with_two_is_told(stage: Stage) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        reply = await stage.http.post(path, json={"messages": MESSAGES})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "no_such_route")
        assert "it is at /v1/chat/completions" in error["message"]


async def test_an_unknown_path_names_those_that_there_are(stage: Stage) -> None:
    error = (await stage.http.get("/v1/nothing")).json()["error"]
    for path in ("/v1/chat/completions", "/v1/models/{id}", "/tokenize", "/metrics", "docs/api.md"):
        assert path in error["message"]
    error = (await stage.http.get("/" + "x" * 5000)).json()["error"]
    assert len(error["message"]) < 2000


async def test_a_wrong_method_names_the_right_ones(stage: Stage) -> None:
    for method, path, allowed in (
        ("GET", "/v1/chat/completions/", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/requests/x", "GET, DELETE, HEAD"),
        ("PATCH", "/ping", "GET, POST, HEAD"),
    ):
        reply = await stage.http.request(method, path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
        assert allowed in reply.json()["error"]["message"]
        assert reply.json()["error"]["code"] == "method_not_allowed"
