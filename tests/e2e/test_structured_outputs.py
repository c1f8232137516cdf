"""Answers held to a form, through the whole system and the openai client: a model with random weights would never write
one.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from services.launcher.redis.embedded_redis import EmbeddedRedis
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.services_in_process import services_in_process

pytestmark = pytest.mark.timeout(600)
QUESTION: Any = [{"role": "user", "content": "what is there?"}]
MODEL = "under-test"


class Place(BaseModel):
    row: int = Field(ge=0, le=9)
    column: int | None = Field(ge=-3, le=3)


class Shape(BaseModel):
    kind: Literal["circle", "square"]
    places: list[Place] = Field(min_length=1, max_length=2)
    is_red: bool


SCHEMA: Any = Shape.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
VALIDATOR = Draft202012Validator(SCHEMA)
# Tokens, more than the longest answer has: 91 characters of JSON with two places, and white space of at most 22
# characters at 32 places. A token is a character or more.
LONGEST = 91 + 32 * 22


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis
) -> Iterator[OpenAI]:
    folder: Path = make_checkpoint(
        tmp_path_factory.mktemp("model") / MODEL, "llama", text={"max_position_embeddings": 1024}
    )
    with (
        services_in_process(folder, redis_server.url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=90) as opened,
    ):
        yield opened


def holds(text: str | None) -> None:
    assert text is not None
    VALIDATOR.validate(json.loads(text))
    assert len(json.loads(text).keys()) == 3, text


def test_chats_follow_a_schema(client: OpenAI) -> None:
    for temperature in (0, 1):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format=FORMAT,
            n=2,
            seed=3,
            temperature=temperature,
        )
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        for choice in answer.choices:
            holds(choice.message.content)
        texts = ["", ""]
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format=FORMAT,
            n=2,
            seed=3,
            temperature=temperature,
            stream=True,
        ):
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
        assert texts == [choice.message.content for choice in answer.choices]


def test_the_clients_own_parsing_works(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Shape, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Shape)
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Shape, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_completions_follow_schemas_and_other_forms(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="a shape",
        max_tokens=LONGEST + 1,
        n=2,
        seed=3,
        extra_body={"guided_json": SCHEMA},
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    for choice in answer.choices:
        holds(choice.text)
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["yes", "no", "図"]}, "yes|no|図"),
        ({"structured_outputs": {"regex": "^a[bc]$"}}, "ab|ac"),
        ({"guided_grammar": 'root ::= "x" | "(" "x" ")"'}, r"x|\(x\)"),
    ]
    for form, expected in forms:
        [choice] = client.completions.create(
            model=MODEL, prompt="x", max_tokens=40, temperature=0, extra_body=form
        ).choices
        assert choice.finish_reason == "stop"
        assert re.fullmatch(expected, choice.text)


def test_what_a_decoder_finds_names_the_clients_field(client: OpenAI) -> None:
    # The one token that is allowed is in none of these forms.
    bodies: list[dict[str, Any]] = [
        {"guided_regex": "[0-9]{4}"},
        {"structured_outputs": {"regex": "[0-9]{4}"}},
        {"response_format": FORMAT},
    ]
    for body, field in zip(
        bodies,
        ("guided_regex", "structured_outputs.regex", "response_format.json_schema.schema"),
        strict=True,
    ):
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(
                model=MODEL, prompt="a", extra_body={"allowed_token_ids": [0], **body}
            )
        error: Any = caught.value
        assert (error.code, error.param) == ("no_token_left", field)
        assert error.body["message"].startswith(f"{field}: ")
