"""What the server says of its own routes is what it has, and the page that shows it needs nothing else."""

import json
import re
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from services.gateway.api.tessera.description.schemas import Schemas
from services.gateway.api.tessera.page import policy_of
from services.gateway.decoding.decode import decode
from services.gateway.reading.generation import read_generation, text_prompt
from services.gateway.reading.options import GenerationOptions
from shared.errors import InvalidRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind
from tests.fuzz.fields import fields_of
from tests.fuzz.rest_target import ROUTES
from tests.support.gateway.served_model import model
from tests.support.gateway.stage import ANSWER, Stage


async def described(http: httpx.AsyncClient) -> dict[str, Any]:
    reply = await http.get("/openapi.json")
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    document: dict[str, Any] = reply.json()
    return document


async def test_every_route_is_described_validly(stage: Stage) -> None:
    document = await described(stage.http)
    validate(document)
    # The error about a path that is not there lists all that are.
    told = (await stage.http.get("/nothing")).json()["error"]["message"].rpartition("has ")[2]
    described_paths = {re.sub(r"\{\w+\}", "{id}", path) for path in document["paths"]}
    assert set(told.split(", ")) == {path for path in described_paths if "/versions/" not in path}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            # Whatever it answers, it is not that there is no such route or method.
            reply = await stage.http.request(method, path.replace("{", "").replace("}", ""))
            assert reply.status_code != 405, path
            assert not operation["summary"].startswith(method.upper()), path
            assert operation["security"] == []


async def test_a_form_is_described_as_one(stage: Stage) -> None:
    document = await described(stage.http)
    [(kind, content)] = document["paths"]["/v1/files"]["post"]["requestBody"]["content"].items()
    assert kind == "multipart/form-data"
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert schema["properties"].keys() == {
        "file", "purpose", "expires_after[anchor]", "expires_after[seconds]"
    }  # fmt: skip
    assert schema["required"] == ["file"]
    sent = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    sent["expires_after[seconds]"] = "3600"
    reply = await stage.http.post("/v1/files", data=sent, files={"file": b"{}"})
    assert reply.status_code == 200
    assert reply.json()["expires_at"] - reply.json()["created_at"] == 3600


async def test_examples_of_bodies_are_answered(stage: Stage) -> None:
    document = await described(stage.http)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        reply = await stage.http.post(path, json=body["example"])
        assert reply.status_code == 200 and ANSWER[:10] in reply.text, path


async def test_fields_are_told_with_their_types_and_those_that_are_refused_are_left_out(
    stage: Stage,
) -> None:
    document = await described(stage.http)
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert next(iter(fields)) == "messages"
    assert fields["top_k"]["type"] == ["integer", "null"]
    assert (fields["temperature"]["minimum"], fields["temperature"]["maximum"]) == (0, 2)
    assert not {"suffix", "modalities", "logits_processors"} & fields.keys()
    for name, schema in document["components"]["schemas"].items():
        if name.endswith(("Request", "Body", "Parameters", "Options")):
            lacking = [k for k, v in schema["properties"].items() if "description" not in v]
            assert lacking == [], name


BOUNDED = {
    name: field
    for name, field in Schemas([GenerationOptions]).fields(GenerationOptions).items()
    if {"minimum", "maximum", "exclusiveMinimum"} & field.keys()
}
# Of completions of a text.
_ELSEWHERE = {"thinking_token_budget", "timeout"}


@pytest.mark.parametrize("name", sorted(BOUNDED.keys() - _ELSEWHERE))
def test_bounds_that_are_told_are_those_that_hold(name: str) -> None:
    bounds = BOUNDED[name]
    wrong = []
    if "minimum" in bounds:
        wrong.append(bounds["minimum"] - 1)
        taken(name, bounds["minimum"])
    if "exclusiveMinimum" in bounds:
        wrong.append(bounds["exclusiveMinimum"])
    if "maximum" in bounds:
        wrong.append(bounds["maximum"] + 1)
        taken(name, bounds["maximum"])
    for value in wrong:
        with pytest.raises(InvalidRequest) as caught:
            taken(name, value)
        assert caught.value.metadata["field"] == name


def taken(name: str, value: float) -> None:
    body = {name: value, "echo": True, "use_beam_search": name == "length_penalty"}
    if name == "truncate_prompt_tokens":
        body["echo"] = False
    options = decode(json.dumps(body).encode(), GenerationOptions)
    kind = ReplyKind.REPLY_KIND_COMPLETION
    read_generation(options, text_prompt("hello"), kind, None, model())


async def test_the_page_loads_nothing_from_elsewhere(stage: Stage) -> None:
    page = await stage.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:src|href)=\"(?!/|data:)", page.text)
    assert not re.search(r"https?://", page.text)
    # What the policy does not let run: styles and handlers in attributes.
    assert not re.search(r"<[^>]*\s(?:style|on\w+)=", page.text)
    policy = page.headers["content-security-policy"]
    assert policy == policy_of(page.text) and "default-src 'none'" in policy
    for tag in ("script", "style"):
        assert f"{tag}-src 'sha256-" in policy and page.text.count(f"<{tag}") == 1


async def test_every_body_is_drawn_by_the_fuzzer(stage: Stage) -> None:
    """`tests/fuzz` sends to each route that has a body, and every field of it."""
    document = await described(stage.http)
    sent = {path for method, path in ROUTES if method == "POST"}
    seen = set()
    for template, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is None or "application/json" not in body["content"]:
            continue
        path = template.replace("{model}", "fuzzed")
        if "/versions/" in path:  # as without it
            continue
        assert path in sent, path
        seen.add(path)
        missing = fields_in(body["content"]["application/json"]["schema"], document)
        assert missing - {*fields_of(path)} == set(), path
    assert seen >= {
        "/v1/chat/completions",
        "/v1/messages",
        "/generate",
        "/api/chat",
        "/v2/models/fuzzed/infer",
    }


def fields_in(schema: Any, document: Any) -> set[str]:
    """The names on top of a body, of each of its forms."""
    if "$ref" in schema:
        named = schema["$ref"].rpartition("/")[2]
        return fields_in(document["components"]["schemas"][named], document)
    found = set(schema.get("properties", {}))
    for one in schema.get("anyOf", schema.get("oneOf", [])):
        found |= fields_in(one, document)
    return found
