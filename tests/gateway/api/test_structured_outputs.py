"""A form reaches the queue as one grammar, by REST and gRPC alike; what cannot be held to is refused before anything is
prepared.
"""

import json
import re
from typing import Any

import openai
import pytest

from shared.errors import InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.chat_pb2 import (
    ChatMessage,
    ChatRequest,
    Choice,
    CompleteRequest,
    ContentPart,
    GenerationOptions,
    StructuredOutputs,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.forms import Acceptor
from tests.support.gateway.stage import MODEL, Stage

MESSAGES: Any = [{"role": "user", "content": "What is there?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
}


def grammars(stage: Stage) -> list[str]:
    """Of the requests that the scheduler took."""
    return [played.spec.sampling.grammar for played in stage.scheduler.played.values()]


def grammar(stage: Stage) -> str:
    return grammars(stage)[-1]


def holds(stage: Stage, good: str, bad: str) -> None:
    accepts = Acceptor(stage.tokenizer, "<|im_end|>").accepts
    assert accepts(grammar(stage), good) and not accepts(grammar(stage), bad)


async def test_the_openai_clients_fields_are_one_grammar(stage: Stage) -> None:
    await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT
    )
    holds(stage, '{"a": 1}', '{"a": "1"}')
    json_object: Any = {"type": "json_object"}
    stream = await stage.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=json_object, stream=True
    )
    assert [chunk async for chunk in stream]
    holds(stage, '{"b": []}', "[]")
    await stage.openai.completions.create(
        model=MODEL, prompt="x", n=2, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    holds(stage, "no", "maybe")
    await stage.openai.completions.create(
        model=MODEL, prompt=["x", "y"], extra_body={"guided_regex": "[0-9]+"}
    )
    assert len({*grammars(stage)[-2:]}) == 1
    holds(stage, "42", "4x")
    await stage.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert grammar(stage) == ""


async def test_the_place_of_what_is_not_supported_reaches_the_client(stage: Stage) -> None:
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await stage.openai.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_format=form, stream=stream
            )
        place = "response_format.json_schema.schema.properties.tags"
        assert (caught.value.param, caught.value.code) == (place, "unsupported_schema")
        body: Any = caught.value.body
        assert body["message"] == f'{place}: "uniqueItems" is not supported; leave it out'
    body = {"prompt": ["a", "b"], "guided_regex": "(?=a)"}
    reply = await stage.http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_grammar"
    assert not stage.preprocess.seen
    metrics = (await stage.http.get("/metrics")).text
    for reason, count in (("unsupported_schema", 2), ("invalid_grammar", 1)):
        assert re.search(rf'reason="{reason}"[^}}]*}} {count}\.0', metrics)


OUTPUTS: list[tuple[StructuredOutputs, str, str]] = [
    (StructuredOutputs(json=json.dumps(SCHEMA)), '{"a": 1}', "{}"),
    (StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True), '{"a":1}', '{"a": 1}'),
    (StructuredOutputs(json_object=True, whitespace_pattern="_"), '{"a":_1}', '{"a": 1}'),
    (StructuredOutputs(regex="a+"), "aa", "b"),
    (StructuredOutputs(choice=Choice(texts=["a", "b"])), "b", "c"),
    (StructuredOutputs(grammar='root ::= "a" | "b"'), "b", "c"),
    (StructuredOutputs(structural_tag='{"format": {"type": "const_string", "value": "a"}}'), "a", "b"),
    (StructuredOutputs(json='{"properties": {"a": {}}}', disable_additional_properties=False), '{"b": 1}', "["),
    (StructuredOutputs(json='{"properties": {"a": {}}}'), '{"a": 1}', '{"b": 1}'),
]  # fmt: skip


async def test_grpc_has_the_same_forms(stage: Stage) -> None:
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = ChatServiceStub(channel)
        for outputs, good, bad in OUTPUTS:
            options = GenerationOptions(structured_outputs=outputs)
            async for _ in stub.Complete(CompleteRequest(text="x", options=options)):
                pass
            holds(stage, good, bad)


REFUSED: list[tuple[StructuredOutputs, str]] = [
    (StructuredOutputs(json='{"not": {}}'), "structured_outputs.json"),
    (StructuredOutputs(regex="("), "structured_outputs.regex"),
    (StructuredOutputs(choice=Choice()), "structured_outputs.choice"),
    (StructuredOutputs(whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
]


async def test_grpc_names_what_it_refuses(stage: Stage) -> None:
    message = ChatMessage(role="user", content=[ContentPart(text="x")])
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = ChatServiceStub(channel)
        for outputs, field in REFUSED:
            options = GenerationOptions(structured_outputs=outputs)
            request = ChatRequest(messages=[message], options=options)
            with pytest.raises(InvalidRequest) as caught, calling("gateway"):
                async for _ in stub.Chat(request):
                    pass
            assert caught.value.metadata["field"] == field
    assert not stage.preprocess.seen
