"""A stream that broke goes on at any gateway: exactly the rest, whatever the answer has beside text."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

from services.gateway.gateway import Gateway
from shared.errors import InvalidRequest, NotFound
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.chat_pb2 import (
    ChatEvent,
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    FollowRequest,
    GenerationOptions,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import ANSWER, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, event_ids, events, merged, with_ids
from tests.support.tokenizers import token_id

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is there?"}]
USAGE = {"include_usage": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES}),
    (
        CHAT,
        {"messages": MESSAGES, "stop": ["blue square. 图", "circle 😁"], "stream_options": USAGE},
    ),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "n": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "prompt_logprobs": 1,
            "stop": ["left of"],
            "stream_options": USAGE | {"continuous_usage_stats": True},
        },
    ),
    (
        COMPLETIONS,
        {"prompt": "Here: ", "n": 2, "echo": True, "logprobs": 1, "return_token_ids": True},
    ),
    (COMPLETIONS, {"prompt": "Here: ", "max_tokens": 0, "echo": True, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "Here: ", "skip_special_tokens": False, "stream_options": USAGE}),
]


def speak_differently(stage: Stage) -> None:
    """Each choice has an answer of its own, in steps of one to three tokens."""
    eos = token_id(stage.tokenizer, "<|im_end|>")

    def answer(spec: Any, choice: int) -> list[list[int]]:
        ids = [*stage.tokenizer.encode(ANSWER[3 * choice :]).ids, eos]
        size = 1 + choice
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    stage.scheduler.answer_choice = answer


async def rest_of(gateway: Gateway, after: str, **query: str) -> httpx.Response:
    rid = after.partition("/")[0]
    async with plain_client(gateway.url, timeout=60) as client:
        return await client.get(f"/v1/requests/{rid}/stream", params={"after": after, **query})


@pytest.mark.parametrize(("route", "body"), BODIES)
async def test_the_rest_after_every_event_of_an_ended_stream(
    stage: Stage, other: Gateway, route: str, body: dict[str, Any]
) -> None:
    speak_differently(stage)
    whole = (await stage.http.post(route, json={**body, "stream": True}, headers=ASK_FOR_IDS)).text
    pairs = with_ids(whole)
    assert len({name for name, _ in pairs}) >= len(pairs) - 1  # usage shares the id of the end
    for index, (name, _) in enumerate(pairs):
        found = await rest_of(other, name)
        assert found.status_code == 200 and found.text.endswith("data: [DONE]\n\n")
        rest = [chunk for later, chunk in pairs[index + 1 :] if later != name]
        usage = [chunk for _, chunk in pairs if not chunk["choices"]]
        rest += [chunk for chunk in usage if chunk not in rest]  # sent again on every resume
        assert merged(events(found.text)) == merged(rest), name
        assert event_ids(found.text)[-1:] in ([pairs[-1][0]], []), "all has been sent at the end"
    again = (await rest_of(other, f"{pairs[0][0].partition('/')[0]}/h0")).text
    assert merged(events(again)) == merged([chunk for _, chunk in pairs])


async def test_two_clients_see_the_same_bytes_of_a_running_stream(
    stage: Stage, other: Gateway
) -> None:
    go, tokens = asyncio.Semaphore(0), stage.says(ANSWER)

    async def step(rid: str, index: int) -> None:
        await go.acquire()

    stage.scheduler.step = step
    body = {"messages": MESSAGES, "stream": True, "stop": ["blue sq"], "logprobs": True}
    async with stage.http.stream("POST", CHAT, json=body, headers=ASK_FOR_IDS) as first:
        seen = first.aiter_text()
        rid = first.headers["x-request-id"]
        text = ""
        for index in range(1, 4):  # one at a time: each is an event of its own
            go.release()
            text = await _until(seen, text, f"id: {rid}/{index}\n")
        async with (
            plain_client(other.url, timeout=60) as client,
            client.stream("GET", f"/v1/requests/{rid}/stream?after={rid}/1") as second,
        ):
            assert second.headers["x-request-id"] == rid
            also = second.aiter_text()
            resumed = ""
            while f"id: {rid}/3\n" not in resumed:
                resumed += await anext(also)
            for index in range(4, 9):  # one at a time: both have a token before the next comes
                go.release()
                text, resumed = await asyncio.gather(
                    _until(seen, text, f"id: {rid}/{index}"),
                    _until(also, resumed, f"id: {rid}/{index}"),
                )
            for _ in tokens:
                go.release()
            resumed += "".join([part async for part in also])
        text += "".join([part async for part in seen])
    # Tokens 2 and 3 came as one.
    after = text.partition(f"id: {rid}/4\n")[2]
    assert after == resumed.partition(f"id: {rid}/4\n")[2] and "[DONE]" in after
    assert merged(events(resumed)) == merged(
        [chunk for name, chunk in with_ids(text) if name not in (f"{rid}/0", f"{rid}/1")]
    )


async def _until(parts: AsyncIterator[str], text: str, wanted: str) -> str:
    async with asyncio.timeout(60):
        while wanted not in text:
            text += await anext(parts)
    return text


async def test_the_header_is_as_good_as_the_query(stage: Stage, other: Gateway) -> None:
    pairs = with_ids((await stage.chat(with_ids=True, stream=True)).text)
    rid = pairs[0][0].partition("/")[0]
    async with plain_client(other.url) as client:
        found = await client.get(
            f"/v1/requests/{rid}/stream", headers={"Last-Event-ID": pairs[4][0]}
        )
        page = (await client.get("/metrics")).text
    assert 'tessera_resumes_total{engine="0",model_name="tiny-vl"} 1.0' in page
    assert merged(events(found.text)) == merged([chunk for _, chunk in pairs[5:]])


@pytest.mark.parametrize(
    "after",
    ["17", "r_x/17", "{rid}", "{rid}/", "{rid}/1.2", "{rid}/-1", "{rid}/9999", "{rid}/3e", "{rid}/3x",
     "r_00000000_00000000000000000000000000000000/1", "{rid}/03", "{rid}/00", "{rid}/h01", "{rid}/+3",
     "{rid}/1+1", "{rid}/1+0",
     "{rid}/ 3", "{rid}/3 ", " {rid}/3", "{rid}/\u0663", "{rid}/h\u0661", "{rid}/3\n"],
)  # fmt: skip
async def test_what_is_no_event_of_the_request_is_refused(stage: Stage, after: str) -> None:
    rid = (await stage.chat()).headers["x-request-id"]
    found = await stage.http.get(
        f"/v1/requests/{rid}/stream", params={"after": after.format(rid=rid)}
    )
    assert found.status_code == 400
    error = found.json()["error"]
    assert (error["param"], error["code"]) == ("after", "invalid_event_id")


async def test_requests_of_others_are_not_found(stage: Stage) -> None:
    mine = (await stage.chat(user="ada")).headers["x-request-id"]
    tag = mine.split("_")[1]
    for rid in (mine, f"r_{tag}_{'0' * 32}", f"r_00000000_{'0' * 32}", "nonsense"):
        for method, path in (("GET", ""), ("GET", "/stream"), ("DELETE", "")):
            found = await stage.http.request(method, f"/v1/requests/{rid}{path}")
            assert found.status_code == 404, (rid, method)
            assert found.json()["error"]["code"] == "request_not_found"
    assert (await stage.http.get(f"/v1/requests/{mine}?user=ada")).status_code == 200
    again = await stage.http.get(f"/v1/requests/{mine}/stream?user=ada")
    assert merged(events(again.text))["choices"][0]["delta"]["content"] == ANSWER


async def test_an_answers_own_id_names_its_request(stage: Stage, other: Gateway) -> None:
    chat = (await stage.chat(with_ids=True, stream=True)).text
    whole = (await stage.http.post(COMPLETIONS, json={"prompt": "Here:"})).json()["id"]
    (_, chunk), (after, _) = with_ids(chat)[0], with_ids(chat)[5]
    found = await stage.http.get(f"/v1/requests/{chunk['id']}/stream", params={"after": after})
    assert merged(events(found.text)) == merged([chunk for _, chunk in with_ids(chat)[6:]])
    for method in ("GET", "DELETE"):
        state = (await stage.http.request(method, f"/v1/requests/{whole}")).json()
        assert (f"cmpl-{state['id']}", state["status"]) == (whole, "completed")
    async with open_channel(other.grpc_address) as channel:
        follow = FollowRequest(request_id=whole)
        told_texts = [event.delta.text async for event in ChatServiceStub(channel).Follow(follow)]
    assert "".join(told_texts) == ANSWER


async def test_a_failed_answer_fails_again(stage: Stage, other: Gateway) -> None:
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    stage.scheduler.answer = lambda spec: [[5], [6]]
    whole = (await stage.chat(with_ids=True, stream=True)).text
    first = event_ids(whole)[0]
    found = (await rest_of(other, first)).text
    assert found.split("\n\n")[-2] == whole.split("\n\n")[-2] and "bad_luck" in found


async def test_the_openai_client_reads_a_resumed_stream(stage: Stage, other: Gateway) -> None:
    stage.http.headers["Authorization"] = "Bearer none"
    ids = event_ids((await stage.chat(with_ids=True, stream=True)).text)
    rid = ids[0].partition("/")[0]
    async with AsyncOpenAI(base_url=f"{other.url}/v1", api_key="none") as client:
        stream = await client.get(
            f"/requests/{rid}/stream",
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=AsyncStream[ChatCompletionChunk],
            options={"params": {"after": ids[3]}},
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text and ANSWER.endswith(text)


def question(**options: Any) -> ChatRequest:
    message = ChatMessage(role="user", content=[ContentPart(text="hello")])
    return ChatRequest(messages=[message], options=GenerationOptions(**options))


def grpc_merged(events: list[ChatEvent]) -> Any:
    """What gRPC events tell in all."""
    joined: dict[int, dict[str, Any]] = {}
    others: list[Any] = []
    for event in events:
        kind = event.WhichOneof("event")
        if kind != "delta":
            others.append(getattr(event, kind or ""))
            continue
        into = joined.setdefault(event.delta.choice, {"text": "", "ids": [], "logprobs": []})
        into["text"] += event.delta.text
        into["ids"] += event.delta.token_ids
        into["logprobs"] += event.delta.logprobs
    # Choices end in the order in which they are read.
    return joined, sorted(map(str, others))


@pytest.mark.parametrize(
    "request_",
    [
        question(),
        question(n=2, logprobs=1, prompt_logprobs=2, stop=["left of"], return_token_ids=True),
        CompleteRequest(text="Look: ", echo=True, options=GenerationOptions(n=2, logprobs=0)),
        question(use_beam_search=True, n=2, best_of=3),
    ],
)
async def test_follow_gives_the_rest_after_every_event(
    stage: Stage, other: Gateway, request_: ChatRequest | CompleteRequest
) -> None:
    speak_differently(stage)
    async with (
        open_channel(stage.gateway.grpc_address) as here,
        open_channel(other.grpc_address) as there,
    ):
        stub = ChatServiceStub(here)
        call = stub.Chat if isinstance(request_, ChatRequest) else stub.Complete
        whole = [event async for event in call(request_)]  # type: ignore[arg-type]
        rid = whole[0].accepted.request_id
        assert len({event.event_id for event in whole}) == len(whole) - 1
        for index, event in enumerate(whole[:-1]):
            follow = FollowRequest(request_id=rid, after=event.event_id)
            found = [event async for event in ChatServiceStub(there).Follow(follow)]
            assert grpc_merged(found) == grpc_merged(whole[index + 1 :]), event.event_id
        every = [e async for e in ChatServiceStub(there).Follow(FollowRequest(request_id=rid))]
        assert grpc_merged(every) == grpc_merged(whole)


async def test_follow_refuses_what_is_wrong(stage: Stage) -> None:
    rid = (await stage.chat()).headers["x-request-id"]
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = ChatServiceStub(channel)
        for request, error in (
            (FollowRequest(request_id=rid, after="x"), InvalidRequest),
            (FollowRequest(request_id=rid, user="eve"), NotFound),
            (FollowRequest(request_id="x"), NotFound),
        ):
            with pytest.raises(error), calling("gateway"):
                await _first(stub.Follow(request))


async def _first(call: grpc.aio.UnaryStreamCall[Any, Any]) -> Any:
    with contextlib.suppress(StopAsyncIteration):
        return await anext(aiter(call))
