"""One prompt by every API of the whole system: the texts are equal, whole, in a stream, and from every event on."""

import json
import urllib.request
from typing import Any

import pytest

from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("system_of_two")]

PROMPT = "What is in the picture?"
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
MODEL = "/v2/models/tiny"


@pytest.fixture(scope="module")
def system(system_of_two: System) -> System:
    system_of_two.wait_ready()
    return system_of_two


def post(system: System, path: str, body: Any, **headers: str) -> str:
    request = urllib.request.Request(
        f"{system.url}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        text: str = reply.read().decode()
    return text


def text_of(system: System) -> str:
    reply = json.loads(post(system, "/v1/completions", {"prompt": PROMPT, **GREEDY}))
    text: str = reply["choices"][0]["text"]
    return text


def data(stream: str) -> list[Any]:
    return [json.loads(line[5:]) for line in stream.split("\n") if line.startswith("data:")]


def test_every_api_gives_the_text_of_a_completion(system: System) -> None:
    expected = text_of(system)
    no_end = {"max_new_tokens": 12, "do_sample": False, "ignore_eos": True}
    triton = {"text_input": PROMPT, "parameters": GREEDY}
    mindie = {"inputs": PROMPT, "parameters": no_end}
    stream = {"prompt": PROMPT, "stream": True, **GREEDY}
    assert json.loads(post(system, "/generate", {"prompt": PROMPT, **GREEDY}))["text"] == [
        PROMPT + expected
    ]
    assert json.loads(post(system, "/generate", stream).splitlines()[-1])["text"] == [
        PROMPT + expected
    ]
    assert json.loads(post(system, f"{MODEL}/generate", triton))["text_output"] == expected
    found = data(post(system, f"{MODEL}/generate_stream", triton))
    assert "".join(event["text_output"] for event in found) == expected
    assert json.loads(post(system, "/infer", mindie))["generated_text"] == expected
    last = data(post(system, "/infer", {**mindie, "stream": True}))[-1]
    assert last["generated_text"] == expected
    # TGI ends where the model does.
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    assert expected.startswith(json.loads(post(system, "/generate", body))["generated_text"])


def test_a_picture_in_a_prompt_by_every_api(system: System) -> None:
    url = data_url(png(3))
    parts = [{"image": url}, {"text": PROMPT}]
    no_end = {"max_new_tokens": 12, "do_sample": False, "ignore_eos": True}
    texts = {
        json.loads(post(system, "/generate", {"prompt": parts, **GREEDY}))["text"][0].removeprefix(PROMPT),
        json.loads(post(system, f"{MODEL}/generate", {"text_input": parts, **GREEDY}))["text_output"],
        json.loads(post(system, "/infer", {"inputs": parts, "parameters": no_end}))["generated_text"],
    }  # fmt: skip
    assert len(texts) == 1
    [text] = texts
    given = {"parameters": {"max_new_tokens": 12}}
    for inputs in (parts, f"![]({url}){PROMPT}"):
        reply = json.loads(post(system, "/generate", {"inputs": inputs, **given}))
        assert text.startswith(reply["generated_text"])
    assert text != text_of(system)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "details": True}}),
        (f"{MODEL}/generate_stream", {"text_input": PROMPT, **GREEDY}),
    ],
)  # fmt: skip
def test_a_stream_goes_on_from_every_event(system: System, path: str, body: Any) -> None:
    whole = post(system, path, body, **{"x-tessera-event-ids": "1"})
    events = [event for event in whole.replace(": ping\n", "").split("\n\n") if event]
    places = [event.split("\n")[0].removeprefix("id: ") for event in events]
    texts = [data(event)[0] for event in events]
    rid = places[0].partition("/")[0]
    for index, place in enumerate(places[:-1], 1):
        url = f"{system.url}/v1/requests/{rid}/stream?after={place}"
        with urllib.request.urlopen(url, timeout=120) as reply:
            rest = data(reply.read().decode())
        if path == "/generate_stream":
            assert rest == texts[index:]
        else:
            joined = [
                "".join(event["text_output"] for event in some) for some in (rest, texts[index:])
            ]
            assert joined[0] == joined[1]
