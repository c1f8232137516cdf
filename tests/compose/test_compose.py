"""The containers, as a platform engineer runs them. Needs a Docker daemon: `pytest -m compose`."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from services.launcher import cli
from tessera.gateway.v1 import chat_pb2, chat_pb2_grpc
from tests.support.pictures import data_url, png
from tests.support.processes.compose import Stack
from tests.support.waiting import until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


def messages(number: int, question: str = "What is in the picture?") -> list[dict[str, object]]:
    picture = {"type": "image_url", "image_url": {"url": data_url(png(number))}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": question}]}]


def ask(stack: Stack, number: int) -> openai.types.chat.ChatCompletion:
    with openai.OpenAI(base_url=stack.base_url, api_key="none", timeout=60) as client:
        return client.chat.completions.create(
            model=stack.served_model,
            messages=messages(number),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
        )


async def ask_many(
    stack: Stack, numbers: range, max_tokens: int = 24
) -> list[openai.types.chat.ChatCompletion]:
    """The answers to as many questions about different pictures, all asked at once."""
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", timeout=120) as client:
        calls = [
            client.chat.completions.create(
                model=stack.served_model,
                messages=messages(number),  # type: ignore[arg-type]
                temperature=0,
                max_tokens=max_tokens,
                extra_body={"ignore_eos": True},
            )
            for number in numbers
        ]
        return await asyncio.gather(*calls)


def test_chat_over_rest(stack: Stack) -> None:
    answer = ask(stack, 1)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 50  # the picture is in the prompt


def test_chat_over_grpc(stack: Stack) -> None:
    request = chat_pb2.ChatRequest(
        messages=[
            chat_pb2.ChatMessage(
                role="user",
                content=[
                    chat_pb2.ContentPart(image=png(1)),
                    chat_pb2.ContentPart(text="What is in the picture?"),
                ],
            )
        ],
        options=chat_pb2.GenerationOptions(temperature=0, max_tokens=24),
    )
    with grpc.insecure_channel(stack.grpc_address) as channel:
        events = list(chat_pb2_grpc.ChatServiceStub(channel).Chat(request, timeout=60))
    assert events[0].WhichOneof("event") == "accepted"
    assert events[-1].WhichOneof("event") == "usage"
    text = "".join(event.delta.text for event in events if event.WhichOneof("event") == "delta")
    assert text == ask(stack, 1).choices[0].message.content


async def test_replicas_share_the_work(stack: Stack) -> None:
    stack.up(vision_encoder=2, decoder=2)
    until(
        lambda: len(stack.members("vision_encoder")) == 2,
        "two encoders in the registry",
        every_s=0.5,
    )
    until(lambda: len(stack.members("decoder")) == 2, "two decoders in the registry", every_s=0.5)
    answers = await ask_many(stack, range(100, 140))
    assert all(answer.choices[0].message.content for answer in answers)
    held = {instance: stack.artifacts(instance) for instance in stack.members("vision_encoder")}
    assert all(count > 0 for count in held.values()), held
    steps = stack.decoder_steps()
    assert len(steps) == 2
    assert all(count > 0 for count in steps.values()), steps


def test_neighbours_without_the_secrets_are_refused(stack: Stack) -> None:
    """Whoever gets into the network of the containers."""
    told = stack.compose("exec", "-T", "redis", "redis-cli", "ping")
    assert "NOAUTH" in told
    for service, method in (
        ("decoder", "/tessera.decoder.v1.DecoderService/Steps"),
        ("preprocess", "/tessera.preprocess.v1.PreprocessService/Prepare"),
        ("vision_encoder", "/tessera.vision_encoder.v1.VisionEncoderService/Encode"),
        ("scheduler", "/tessera.scheduler.v1.SchedulerService/GetLoad"),
    ):
        (address,) = list(stack.members(service).values())[:1]
        with grpc.insecure_channel(address) as channel:
            call: Any = channel.unary_unary(method)
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, service
    # A command line is for all to see.
    for service in ("redis", "gateway", "decoder"):
        for process in stack.compose("top", service.replace("_", "-")).splitlines():
            assert stack.redis_password() not in process


def test_an_address_that_others_reach_needs_a_key(stack: Stack) -> None:
    run = ["run", "--rm", "--no-deps", "-T", "-e", "TESSERA_GATEWAY_PUBLISHED_HOST=0.0.0.0"]
    with pytest.raises(AssertionError, match=r"--api-key-file .* --allow-unauthenticated"):
        stack.compose(*run, "gateway")


async def test_killed_replicas_cost_no_answer(stack: Stack) -> None:
    stack.up(vision_encoder=2, decoder=2)
    calm = await ask_many(stack, range(200, 208), max_tokens=200)
    restarts = stack.restarts("decoder") + stack.restarts("vision_encoder")
    victims = [stack.host_pid("decoder"), stack.host_pid("vision_encoder")]
    steps = sum(stack.decoder_steps().values())

    disturbed = asyncio.create_task(ask_many(stack, range(200, 208), max_tokens=200))
    while sum(stack.decoder_steps().values()) < steps + 30:  # in the middle of the answers
        await asyncio.sleep(0.05)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert not disturbed.done()
    answers = await disturbed

    assert [a.choices[0].message.content for a in answers] == [
        a.choices[0].message.content for a in calm
    ]
    assert all(a.usage is not None and a.usage.completion_tokens == 200 for a in answers)
    until(
        lambda: stack.restarts("decoder") + stack.restarts("vision_encoder") >= restarts + 2,
        "killed containers are started again",
        every_s=0.5,
    )
    stack.up(vision_encoder=2, decoder=2)
    assert ask(stack, 300).choices[0].message.content


def test_every_container_may_die_and_nothing_is_lost(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stack.up(vision_encoder=2, decoder=2)
    monkeypatch.chdir(Path(__file__).parents[2])  # where compose.yaml is
    file = tmp_path / "result.json"
    cli.run(
        [
            *("bench", "--kill", "gateway,decoder,scheduler,encoder,preprocess,redis"),
            *("--times", "1", "--num-requests", "48", "--compose", "--project", stack.project),
            *("--base-url", stack.base_url, "--output", str(file)),
        ]
    )
    verdict = json.loads(file.read_text())
    assert verdict["problems"] == []
    assert (verdict["completed"], verdict["equal"]) == (48, 48)
