"""The ollama client with the whole system: its answers are those of OpenAI's API."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from openai import OpenAI

from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("system_of_two")]
TEXT = "What is in the picture?"
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def system(system_of_two: System) -> System:
    system_of_two.wait_ready()
    return system_of_two


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[ollama.Client]:
    with ollama.Client(system.url, timeout=120) as opened:
        yield opened


def test_pictures_get_the_answers_of_openais_api(system: System, client: ollama.Client) -> None:
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url(png(3))}},
        {"type": "text", "text": TEXT},
    ]
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=120) as openai:
        answer = openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": parts}],
            max_tokens=12,
            temperature=0,
        )
    wanted, usage = answer.choices[0].message.content, answer.usage
    assert wanted and usage is not None
    turn = {"role": "user", "content": TEXT, "images": [png(3)]}
    chat = client.chat("tiny", [turn], options=GREEDY)
    *parts, last = client.chat("tiny", [turn], options=GREEDY, stream=True)
    generated = client.generate("tiny", TEXT, images=[png(3)], options=GREEDY)
    assert chat.message.content == generated.response == wanted
    assert "".join(part.message.content or "" for part in parts) == wanted
    for end in (chat, generated, last):
        assert end.done_reason == answer.choices[0].finish_reason
        assert (end.prompt_eval_count, end.eval_count) == (
            usage.prompt_tokens,
            usage.completion_tokens,
        )


def test_a_plain_prompt_goes_on_as_in_completions(system: System, client: ollama.Client) -> None:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=120) as openai:
        wanted = openai.completions.create(
            model="tiny", prompt="hello there", max_tokens=12, temperature=0
        )
    lines = client.generate("tiny", "hello there", raw=True, options=GREEDY, stream=True)
    assert "".join(line.response or "" for line in lines) == wanted.choices[0].text


def test_a_picture_that_is_none_is_a_400(client: ollama.Client) -> None:
    turn = {"role": "user", "content": TEXT, "images": [b"no picture"]}
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images\[0\]") as caught:
        client.chat("tiny", [turn])
    assert caught.value.status_code == 400


def test_a_schema_is_kept(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "round": {"type": "boolean"}},
        "required": ["colour", "round"],
    }
    options = {"temperature": 0, "num_predict": 200}
    chat = client.chat(
        "tiny", [{"role": "user", "content": "hello"}], format=schema, options=options
    )
    *parts, _ = client.generate("tiny", "hello", format=schema, options=options, stream=True)
    for text in (chat.message.content or "", "".join(part.response or "" for part in parts)):
        found = json.loads(text)
        assert found["colour"] in ("red", "blue") and isinstance(found["round"], bool)
