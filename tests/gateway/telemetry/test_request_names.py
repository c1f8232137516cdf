"""What a request is called: by us, and by its client in X-Request-Id."""

from typing import Any

import anthropic
import pytest

from services.gateway.admission.admission import Admission
from tests.support.gateway.stage import MODEL, Stage

OWN = "trace-7f3.a:b/c+d=e@f_g"


async def test_a_clients_own_name_comes_back_in_every_reply(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.http.headers["X-Request-Id"] = OWN
    replies = [
        await stage.chat(),
        await stage.chat(stream=True),
        await stage.chat(temperature=9),
        await stage.http.get("/v1/nothing"),
    ]
    assert [reply.status_code for reply in replies] == [200, 200, 400, 404]
    assert {reply.headers["x-request-id"] for reply in replies} == {OWN}
    ours = replies[0].headers["x-tessera-request-id"]
    assert replies[0].json()["id"] == f"chatcmpl-{ours}"
    assert (await stage.http.get(f"/v1/requests/{ours}")).json()["id"] == ours

    async def broken(*_: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Admission, "accept", broken)
    failed = await stage.chat()
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, OWN)
    assert OWN in failed.json()["error"]["message"]


@pytest.mark.parametrize("name", ["two words", "x" * 129, "é".encode(), '"quoted"', ""])
async def test_names_that_logs_could_not_hold_are_not_taken(
    stage: Stage, name: str | bytes
) -> None:
    headers: Any = {"X-Request-Id": name}
    reply = await stage.http.get("/v1/models", headers=headers)
    ours = reply.headers["x-tessera-request-id"]
    assert ours.startswith("r_") and reply.headers["x-request-id"] == ours


async def test_anthropics_clients_find_the_name_where_they_look(stage: Stage) -> None:
    client = anthropic.AsyncAnthropic(
        base_url=stage.gateway.url,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
    )
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    async with client:
        message = await client.messages.create(**asked, max_tokens=50)
        assert message.id == f"msg_{message._request_id}"
        async with client.messages.stream(**asked, max_tokens=50) as stream:
            assert (await stream.get_final_message()).id == f"msg_{stream.request_id}"
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked, max_tokens=0)
        assert (refused.value.request_id or "").startswith("r_")
    assert "request-id" not in (await stage.http.get("/v1/models")).headers
