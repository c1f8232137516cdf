"""CORS: which headers browsers get for pages of other origins."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.stage import Stage, open_stage

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.org"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_no_page_is_let_in_by_default(stage: Stage) -> None:
    asked = await stage.http.options(CHAT, headers={"Origin": PAGE, **ASKS})
    assert asked.status_code == 405
    stage.http.headers["Origin"] = PAGE
    for reply in (asked, await stage.chat(), await stage.chat(stream=True)):
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("origins", "told"), [(f"http://localhost:3000, {PAGE}/", PAGE), ("*", "*")]
)
async def test_a_named_page_may_ask_and_read(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, origins: str, told: str
) -> None:
    changes = {"cors_allow_origins": origins, "api_key": "k"}
    async with open_stage(redis_url, model_folder, tokenizer, **changes) as stage:
        stage.http.headers["Origin"] = PAGE
        asked = await stage.http.options(CHAT, headers=ASKS)
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["access-control-allow-origin"] == told
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        gone = await stage.http.options("/v1/nothing", headers=ASKS)
        refused = await stage.chat()
        stage.http.headers["Authorization"] = "Bearer k"
        replies = [gone, refused, await stage.chat(), await stage.chat(stream=True)]
    assert [reply.status_code for reply in replies] == [404, 401, 200, 200]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == told
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert ("Origin" in reply.headers.get("vary", "")) == (told != "*")


@pytest.mark.parametrize("origin", ["https://evil.example.org", f"{PAGE}.evil.org", "null", ""])
async def test_other_pages_stay_outside(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, origin: str
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, cors_allow_origins=PAGE) as stage:
        headers = {"Origin": origin} if origin else {}
        asked = await stage.http.options(CHAT, headers={**headers, **ASKS})
        stage.http.headers.update(headers)
        reply = await stage.chat()
    assert (asked.status_code, reply.status_code) == (405, 200)
    for answer in (asked, reply):
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "Origin", "caches must not give it to those let in"
