"""Vectors and scores over gRPC are those of REST, and so is what is refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from shared.errors import Internal, InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.common.v1.ending_pb2 import Failure
from tessera.gateway.v1.chat_pb2 import ChatMessage, ContentPart, ListModelsRequest, TokenIds
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tessera.gateway.v1.vectors_pb2 import (
    PoolEvent,
    PoolInput,
    PoolOptions,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from tessera.gateway.v1.vectors_pb2_grpc import VectorServiceStub
from tests.support.gateway.stage import MODEL, Stage

Metadata = Sequence[tuple[str, str]]


@contextlib.asynccontextmanager
async def vectors_of(stage: Stage) -> AsyncIterator[Any]:
    async with open_channel(stage.gateway.grpc_address) as channel:
        yield VectorServiceStub(channel)


async def pooled(stage: Stage, request: PoolRequest, metadata: Metadata = ()) -> list[PoolEvent]:
    async with vectors_of(stage) as stub:
        with calling("gateway"):
            return [event async for event in stub.Pool(request, metadata=metadata)]


async def over_rest(stage: Stage, path: str, **body: Any) -> Any:
    return (await stage.http.post(path, json={"model": MODEL, **body})).json()


def texts(*given: str) -> list[PoolInput]:
    return [PoolInput(text=text) for text in given]


def conversation(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=[ContentPart(text=text)])]


async def test_vectors_are_those_of_rest(embeds: Stage) -> None:
    inputs = [f"text {'x' * n}" for n in range(6)]  # more than are pooled at a time
    ids = embeds.tokenizer.encode("some words").ids
    by_ids = PoolInput(token_ids=TokenIds(ids=ids))
    changes: list[dict[str, Any]] = [
        {},
        {"dimensions": 4},
        {"use_activation": False},
        {"prompt_name": "query"},
        {"task": "embed"},
    ]
    for change in changes:
        *events, last = await pooled(embeds, PoolRequest(input=[*texts(*inputs), by_ids], **change))
        reply = await over_rest(embeds, "/pooling", input=[*inputs, ids], **change)
        assert [event.vector.index for event in events] == list(range(7))
        assert [list(event.vector.values) for event in events] == [d["data"] for d in reply["data"]]
        assert len({tuple(event.vector.values) for event in events}) > 1
        assert last.usage.prompt_tokens == reply["usage"]["prompt_tokens"] > 0


async def test_a_conversation_is_rendered_as_over_rest(embeds: Stage) -> None:
    kwargs, options = {"fine": True}, {"add_special_tokens": False, "priority": 3}
    request = PoolRequest(
        messages=conversation("hello"),
        chat_template_kwargs_json='{"fine": true}',
        add_generation_prompt=True,
        options=PoolOptions(**options),  # type: ignore[arg-type]
    )
    events = await pooled(embeds, request)
    asked: Any = {
        "messages": [{"role": "user", "content": "hello"}],
        "chat_template_kwargs": kwargs,
        "add_generation_prompt": True,
        **options,
    }
    reply = await over_rest(embeds, "/v1/embeddings", **asked)
    assert list(events[0].vector.values) == reply["data"][0]["embedding"]
    ours, theirs = embeds.preprocess.seen[-2:]
    ours.request_id = theirs.request_id
    assert ours == theirs


async def test_media_are_named_and_processed_as_over_rest(embeds: Stage) -> None:
    url = "https://example.org/a.png"
    parts = [ContentPart(image_url=url, uuid="dog"), ContentPart(image_url="", uuid="cat")]
    options = {
        "mm_processor_kwargs": {"max_pixels": 401408},
        "media_io_kwargs": {"video": {"fps": 1}},
    }
    request = PoolRequest(
        messages=[ChatMessage(role="user", content=parts)],
        mm_processor_kwargs_json=json.dumps(options["mm_processor_kwargs"]),
        media_io_kwargs_json=json.dumps(options["media_io_kwargs"]),
    )
    await pooled(embeds, request)
    content = [
        {"type": "image_url", "image_url": url, "uuid": "dog"},
        {"type": "image_url", "image_url": None, "uuid": "cat"},
    ]
    reply = await over_rest(
        embeds, "/pooling", messages=[{"role": "user", "content": content}], **options
    )
    assert reply["data"]
    ours, theirs = embeds.preprocess.seen[-2:]
    assert list(ours.conversation.item_names) == ["dog", "cat"]
    for name in options:
        mine, other = (getattr(one.media_options, f"{name}_json") for one in (ours, theirs))
        assert json.loads(mine) == json.loads(other) == options[name]
    ours.request_id = theirs.request_id
    ours.media_options.CopyFrom(theirs.media_options)  # whose JSON has no spaces
    assert ours == theirs


async def test_classes_are_those_of_rest(classifies: Stage) -> None:
    events = await pooled(classifies, PoolRequest(input=texts("a", "b")))
    reply = await over_rest(classifies, "/classify", input=["a", "b"])
    for event, one in zip(events[:-1], reply["data"], strict=True):
        assert (event.vector.label, list(event.vector.values)) == (one["label"], one["probs"])


async def test_scores_are_those_of_rest(scores: Stage) -> None:
    async with vectors_of(scores) as stub:
        documents = ["longer than the others are", "short", "in the middle"]
        found = await stub.Score(ScoreRequest(queries=["which?"], documents=documents))
        asked = RerankRequest(query="which?", documents=documents, top_n=2, use_activation=False)
        ranking = await stub.Rerank(asked)
    reply = await over_rest(scores, "/score", queries="which?", documents=documents)
    assert list(found.scores) == [one["score"] for one in reply["data"]]
    assert found.usage.prompt_tokens == reply["usage"]["prompt_tokens"]
    more: Any = {"top_n": 2, "use_activation": False}
    reply = await over_rest(scores, "/rerank", query="which?", documents=documents, **more)
    assert [(one.index, one.relevance_score) for one in ranking.results] == [
        (one["index"], one["relevance_score"]) for one in reply["results"]
    ]
    async with open_channel(scores.gateway.grpc_address) as channel:
        models = await ChatServiceStub(channel).ListModels(ListModelsRequest())
    assert list(models.models[0].tasks) == ["classify", "score"]


REFUSED: list[tuple[PoolRequest, dict[str, Any]]] = [
    (PoolRequest(), {}),
    (PoolRequest(input=texts("a", "")), {"input": ["a", ""]}),
    (PoolRequest(input=texts("a"), dimensions=5), {"input": ["a"], "dimensions": 5}),
    (PoolRequest(input=texts("a"), prompt_name="x"), {"input": ["a"], "prompt_name": "x"}),
    (PoolRequest(input=texts("a"), task="classify"), {"input": ["a"], "task": "classify"}),
    (PoolRequest(input=texts("a"), task="x"), {"input": ["a"], "task": "x"}),
    (
        PoolRequest(input=texts("a"), options=PoolOptions(truncate_prompt_tokens=0)),
        {"input": ["a"], "truncate_prompt_tokens": 0},
    ),
    (
        PoolRequest(input=texts("a"), options=PoolOptions(service_tier="x")),
        {"input": ["a"], "service_tier": "x"},
    ),
    (
        PoolRequest(messages=conversation("a"), mm_processor_kwargs_json="[]"),
        {"messages": [{"role": "user", "content": "a"}], "mm_processor_kwargs": []},
    ),
    (
        PoolRequest(messages=conversation("a"), media_io_kwargs_json='"a"'),
        {"messages": [{"role": "user", "content": "a"}], "media_io_kwargs": "a"},
    ),
    (
        PoolRequest(input=texts("a"), messages=conversation("b")),
        {"input": ["a"], "messages": [{"role": "user", "content": "b"}]},
    ),
    (
        PoolRequest(
            input=[*texts("a", "b", "c", "d"), PoolInput(token_ids=TokenIds(ids=[1] * 70))]
        ),
        {"input": ["a", "b", "c", "d", [1] * 70]},
    ),
    (PoolRequest(messages=[ChatMessage(role="x")]), {"messages": [{"role": "x"}]}),
    (
        PoolRequest(
            messages=conversation("a"), add_generation_prompt=True, continue_final_message=True
        ),
        {
            "messages": [{"role": "user", "content": "a"}],
            "add_generation_prompt": True,
            "continue_final_message": True,
        },
    ),
]


async def test_refusals_are_those_of_rest(embeds: Stage) -> None:
    for request, body in REFUSED:
        with pytest.raises(InvalidRequest) as caught:
            await pooled(embeds, request)
        error = (await over_rest(embeds, "/pooling", **body))["error"]
        told = caught.value
        assert (told.reason.lower(), told.metadata["field"]) == (error["code"], error["param"])
        assert told.message == error["message"]


async def test_refusals_of_scores_are_those_of_rest(embeds: Stage) -> None:
    async with vectors_of(embeds) as stub:
        for call, path, body in (
            (
                stub.Score(ScoreRequest(documents=["a"])),
                "/score",
                {"documents": ["a"], "queries": []},
            ),
            (
                stub.Score(ScoreRequest(queries=["a", "b"], documents=["c"])),
                "/score",
                {"queries": ["a", "b"], "documents": ["c"]},
            ),
            (
                stub.Rerank(RerankRequest(query="a", documents=["b"], top_n=-1)),
                "/rerank",
                {"query": "a", "documents": ["b"], "top_n": -1},
            ),
            (
                stub.Rerank(RerankRequest(query="a", documents=["b"], instruction="c")),
                "/rerank",
                {"query": "a", "documents": ["b"], "instruction": "c"},
            ),
        ):
            with pytest.raises(InvalidRequest) as caught, calling("gateway"):
                await call
            error = (await over_rest(embeds, path, **body))["error"]
            assert caught.value.metadata["field"] == error["param"]
            assert caught.value.message == error["message"]


async def test_a_server_that_generates_gives_no_vectors(stage: Stage) -> None:
    with pytest.raises(InvalidRequest, match="--task") as caught:
        await pooled(stage, PoolRequest(input=texts("a"), task="embed"))
    assert caught.value.reason == "TASK_NOT_SERVED"


async def test_a_call_with_a_key_is_one_request_and_no_stream(embeds: Stage) -> None:
    request, key = PoolRequest(input=texts("some words")), ("idempotency-key", "one")
    first, second = [await pooled(embeds, request, (key,)) for _ in range(2)]
    assert first == second and len(embeds.scheduler.played) == 1
    with pytest.raises(InvalidRequest) as caught:
        await pooled(embeds, request, (key, ("last-event-id", "r_a_b/1")))
    assert caught.value.metadata["field"] == "Last-Event-ID"


async def test_a_prompt_that_fails_ends_the_call(embeds: Stage) -> None:
    embeds.scheduler.failure = Failure(code=13, reason="NAN_LOGITS", message="not a number")
    with pytest.raises(Internal, match="not a number"):
        await pooled(embeds, PoolRequest(input=texts("a", "b")))


async def test_cancelling_the_call_cancels_its_requests(embeds: Stage) -> None:
    embeds.scheduler.taking = False
    async with vectors_of(embeds) as stub, asyncio.timeout(30):
        call = stub.Pool(PoolRequest(input=texts("a", "b", "c", "d")))
        reading = asyncio.create_task(call.read())
        await embeds.admitted(3)
        call.cancel()
        while await embeds.scheduler.queue.depth() != (0, 0):
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await reading
