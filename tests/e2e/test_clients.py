"""What clients do with the whole system: questions about pictures, streams, disconnects, invalid requests, failures."""

import asyncio
import base64
import json
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("system_of_two")]


@pytest.fixture(scope="module")
def system(system_of_two: System) -> System:
    system_of_two.wait_ready()
    return system_of_two


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


ONE_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def question(number: int = 0) -> list[Any]:
    url = {"url": data_url(png(number))}
    text = {"type": "text", "text": "What is in the picture?"}
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}, text]}]


def ask(client: OpenAI, number: int = 0, count: int = 16, **more: Any) -> str:
    answer = client.chat.completions.create(
        model="tiny",
        messages=question(number),
        max_tokens=count,
        temperature=0,
        extra_body={"ignore_eos": True},
        **more,
    )
    return answer.choices[0].message.content or ""


def metric(system: System, name: str, absent: float | None = None) -> float:
    """A value on the page of metrics, summed over its other labels: each decoder has its own."""
    with urllib.request.urlopen(f"{system.url}/metrics", timeout=60) as page:
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in page.read().decode().splitlines()
            if line.startswith((name + "{", name + ",", name + " "))
        ]
    if not found and absent is None:
        raise AssertionError(f"no metric {name}")
    return sum(found) if found else float(absent or 0)


def test_a_stream_equals_the_complete_answer(client: OpenAI) -> None:
    whole = ask(client)
    chunks = client.chat.completions.create(
        model="tiny",
        messages=question(),
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    pieces, usage = [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole != ""
    assert usage is not None and usage.completion_tokens == 16


def test_different_pictures_get_different_answers(client: OpenAI) -> None:
    assert len({ask(client, number) for number in (1, 7, 13, 19)}) > 1


def test_grpc_gives_the_same_text(system: System, client: OpenAI) -> None:
    request = chat_pb2.ChatRequest(
        messages=[
            chat_pb2.ChatMessage(
                role="user",
                content=[
                    chat_pb2.ContentPart(image=png(3)),
                    chat_pb2.ContentPart(text="What is in the picture?"),
                ],
            )
        ],
        options=chat_pb2.GenerationOptions(max_tokens=16, temperature=0, ignore_eos=True),
    )
    with grpc.insecure_channel(system.grpc_address) as channel:
        events = list(ChatServiceStub(channel).Chat(request, timeout=90))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted" and kinds[-2:] == ["finished", "usage"]
    assert "".join(event.delta.text for event in events) == ask(client, 3)


def test_sixty_four_streams_at_once(system: System) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=question(number % 8),
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=system.base_url, api_key="none", timeout=150) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    answers = asyncio.run(all_of_them())
    assert [answers[i] for i in range(64)] == [answers[i % 8] for i in range(64)]


def test_both_decoders_take_work(system: System) -> None:
    loads = urllib.request.urlopen(f"{system.url}/health/ready", timeout=60).status
    assert loads == 200
    log = system.log
    assert log.count("decoder bound") >= 2


def test_equal_seeds_give_equal_samples(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=20,
            temperature=1.0,
            top_p=0.95,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].message.content or ""

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "JSON"),
        (b'{"model":"tiny"}', "messages"),
        (b'{"model":"tiny","messages":[]}', "messages"),
        (b'{"model":"other","messages":[{"role":"user","content":"x"}]}', "other"),
        (b'{"model":"tiny","messages":[{"role":"king","content":"x"}]}', "role"),
        (
            b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
            "temperature",
        ),
        (
            b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":99999999}',
            "max_tokens",
        ),
    ],
)
def test_bad_requests_are_refused_with_the_reason(system: System, body: bytes, says: str) -> None:
    status, error = post(system, body)
    assert status in (400, 404)
    assert says in json.dumps(error)
    assert set(error) == {"message", "type", "param", "code"}


def post(system: System, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{system.base_url}/chat/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, {}
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (data_url(png()[:200]), "image"),
        ("data:image/png;base64," + base64.b64encode(b"just words " * 9).decode(), "image"),
        (data_url(ONE_PIXEL), "1"),
        ("http://127.0.0.1:1/x.png", "127.0.0.1"),
        ("http://169.254.169.254/latest/meta-data", "169.254"),
        ("file:///etc/passwd", "url"),
    ],
)
def test_bad_images_are_refused_with_the_reason(system: System, url: str, says: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    status, error = post(system, json.dumps(body).encode())
    assert status == 400, error
    assert says in json.dumps(error)


def test_a_prompt_longer_than_the_model_is_refused_with_the_limit(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the " * 30000}]
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_cancels_its_request(system: System, stream: bool) -> None:
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "go on"}],
            "stream": stream,
            "n": 64,  # seconds of work: what runs is counted about once a second
            "max_tokens": 400,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    before = metric(system, aborted, absent=0.0)
    # On a busy machine an answer may end before anybody has seen that it had begun: then another is asked for.
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", system.port)) as connection:
            connection.sendall(head + body)
            wait_for(
                lambda: can_be_read(connection) or metric(system, "vllm:num_requests_running") > 0
            )
        wait_for(lambda: metric(system, "vllm:num_requests_running") == 0)
        wait_for(lambda: metric(system, "vllm:kv_cache_usage_perc") == 0)
        if metric(system, aborted, absent=0.0) > before:
            return
    pytest.fail("no disconnected client cancelled its request")


def can_be_read(connection: socket.socket) -> bool:
    """Whether an answer has begun."""
    return bool(select.select([connection], [], [], 0)[0])


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# test_failures.py kills each, with requests of more kinds.
@pytest.mark.parametrize("service", ["decoder"])
def test_a_killed_process_fails_no_running_request(
    system: System, client: OpenAI, service: str
) -> None:
    before = ask(client, 2, 120)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(client, 2, 120))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    system.kill(service)
    for thread in threads:
        thread.join()
    assert answers == [before] * 6
    system.wait_ready()
    assert ask(client, 40, 16)


@pytest.mark.full  # with the demo model: tests/launcher/serve/test_serve.py
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    with System(folder) as system:
        pids = system.all_pids()
        assert len(pids) >= 6  # launcher, redis, gateway, preprocess, scheduler, decoder
        assert len(system.leftovers()) == 2
        assert system.stop() == 0
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        assert system.leftovers() == []
