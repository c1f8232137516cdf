"""The log of a whole system: JSON in every line, under faults as well, and neither keys nor prompts in it."""

import base64
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.launcher.state.folders import Folders
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.processes.system import System
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

_KEY = "sk-planted-key-0123456789"
_WRONG = "sk-planted-wrong-9876543210"
_PROMPT = "planted-prompt-text"
_NAME = "planted-by-the-client"
_PICTURE = Path(__file__).parents[3] / "services" / "launcher" / "console" / "example.png"


def turn(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": _PROMPT}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def refused() -> list[dict[str, Any] | bytes]:
    """Bodies with the prompt in them, each with something else that is wrong."""
    data = "data:image/png;base64,"
    deep: Any = _PROMPT
    for _ in range(200):
        deep = [deep]
    plain = turn()
    template = "{{ messages[0].content | no_such_filter }}"
    return [
        {**plain, "temperature": "hot"},
        {**plain, "model": "none-such"},
        {**plain, "max_tokens": 10**9},
        {**plain, "tools": [{"type": "function", "function": {"name": _PROMPT}}]},
        {**plain, "messages": [{"role": "narrator", "content": _PROMPT}]},
        {**plain, "messages": _PROMPT},
        {**plain, "chat_template": template},
        {**plain, "chat_template": "{{ raise_exception(messages[0].content) }}"},
        {**plain, "chat_template": "{{ messages[0].content[9999999].x.y }}"},
        {**plain, "chat_template_kwargs": {"deep": deep}},
        {**plain, "chat_template_kwargs": {"messages": _PROMPT}},
        {**plain, "chat_template": "{{ messages.x(1) }}", "chat_template_kwargs": {"x": _PROMPT}},
        turn(picture(f"https://{'h' * 4000}/{_PROMPT}")),
        turn(picture(f"http://127.0.0.1:1/{_PROMPT}")),
        turn(picture(f"{data}{_PROMPT}!!")),
        turn(picture(data + base64.b64encode(_PROMPT.encode()).decode())),
        {**plain, "stop": [_PROMPT] * 10_000},
        {**plain, "logit_bias": {"one": 1}},
        {**plain, "user": _PROMPT * 100},
        json.dumps(plain).encode()[:-1] + b', "x": ' + _PROMPT.encode(),
        json.dumps(plain).encode() + b"\xff\xfe" + _PROMPT.encode(),
        json.dumps(
            {**plain, "messages": [{"role": "user", "content": "\ud800" + _PROMPT}]}
        ).encode(),
    ]


def provoke(system: System, replies: list[str]) -> None:
    """Errors of many kinds, at both APIs and at all services."""
    headers = {"authorization": f"Bearer {_KEY}", "x-request-id": _NAME}
    with httpx.Client(base_url=system.url, headers=headers, timeout=60) as client:
        for body in refused():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = client.post("/v1/chat/completions", content=content)
            assert reply.status_code < 500, (reply.status_code, reply.text, content[:200])
            if reply.status_code != 200:
                replies.append(reply.text)
        ask = {"authorization": f"Bearer {_WRONG}"}
        for path in ("/v1/chat/completions", f"/v1/models/{_WRONG[:5]}", "/v1/requests/x"):
            replies.append(client.post(path, json=turn(), headers=ask).text)
        replies.append(client.post("/tokenize", json={"prompt": _PROMPT, "model": "m"}).text)
        replies.append(client.post("/detokenize", json={"tokens": [_PROMPT]}).text)
        replies.append(client.post("/v1/completions", json={"prompt": [_PROMPT, 7]}).text)
        replies.append(client.get("/v1/requests/r_x/stream").text)
    with grpc.insecure_channel(system.grpc_address) as channel:
        for key, options in ((_WRONG, {}), (_KEY, {"temperature": 99.0}), (_KEY, {"n": 10_000})):
            message = ChatMessage(role="user", content=[ContentPart(text=_PROMPT)])
            request = ChatRequest(messages=[message], options=GenerationOptions(**options))
            metadata = (("authorization", f"Bearer {key}"), ("x-request-id", _NAME))
            with pytest.raises(grpc.RpcError) as caught:
                list(ChatServiceStub(channel).Chat(request, metadata=metadata))
            replies.append(str(caught.value))
    # The services behind the gateway: messages that cannot be parsed.
    folder = Folders(system.folder / "state").sockets
    methods = (
        *(
            "preprocess.v1.PreprocessService/Prepare",
            "vision_encoder.v1.VisionEncoderService/Encode",
        ),
        *("decoder.v1.DecoderService/Steps", "scheduler.v1.SchedulerService/GetLoad"),
    )
    for socket in folder.glob("*"):
        for method in methods:
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                call: Any = channel.unary_unary(f"/tessera.{method}")
                try:
                    call(b"\xff" + _PROMPT.encode(), timeout=5)
                except grpc.RpcError as error:
                    replies.append(str(error))


def answered(system: System, **more: Any) -> httpx.Response:
    data = base64.b64encode(_PICTURE.read_bytes()).decode()
    body = {**turn(picture(f"data:image/png;base64,{data}")), **more}
    headers = {"authorization": f"Bearer {_KEY}", "x-request-id": _NAME}
    return httpx.post(f"{system.url}/v1/chat/completions", json=body, headers=headers, timeout=120)


def new(system: System, services: Sequence[str], before: dict[str, list[int]]) -> bool:
    """Whether all of these services have other processes than before."""
    now = system.pids()
    return all(now.get(service) and now[service] != before[service] for service in services)


def test_every_line_is_json_and_none_has_a_key_or_a_prompt() -> None:
    replies: list[str] = []
    flags = ("--log-format", "json", "--log-level", "debug", "--api-key", _KEY)
    with System(None, *flags) as system:
        provoke(system, replies)
        found = answered(system)
        assert found.status_code == 200, found.text
        rid = found.headers["x-tessera-request-id"]
        until(lambda: '"throughput"' in system.log, "a line about the work", 60)
        for services in (
            ("decoder", "vision_encoder", "preprocess"),
            ("scheduler", "redis", "gateway"),
        ):
            before = system.pids()
            for service in services:
                # One of them by a fault below Python, which says so by itself.
                number = signal.SIGSEGV if service == "preprocess" else signal.SIGKILL
                os.kill(before[service][0], number)
            until(partial(new, system, services, before), f"new ones of {services}")
            until(lambda: system.ready() and answered(system).status_code == 200, "an answer")
        provoke(system, replies)
        assert system.stop() == 0
        log = system.log
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(isinstance(line, dict) and line["process"] and line["timestamp"] for line in lines)
    assert all("event" in line for line in lines)
    for planted in (_KEY, _WRONG, _PROMPT):
        assert not [line for line in lines if planted in json.dumps(line)], planted
        assert not [reply for reply in replies if planted in reply], planted
    # One request, by both names, in all services.
    told = [line for line in lines if line.get("request_id") == rid]
    all_services = {"gateway", "preprocess", "scheduler", "vision_encoder", "decoder"}
    assert {line["service"] for line in told} == all_services
    assert all(line.get("client_request_id") == _NAME for line in told)
    (end,) = [line for line in told if line["event"] == "request ended"]
    assert end["tenant"].startswith("k") and end["media"] == 1 and end["finish"] == "length"
    assert end["queue_s"] >= 0 and end["first_token_s"] <= end["total_s"]
    reasons = Counter(line.get("error") for line in lines if line["event"] == "request ended")
    assert reasons["INVALID_API_KEY"] == 4 and reasons["INVALID_JSON"] >= 4
    assert not reasons["INTERNAL"]
    work = [line for line in lines if line["event"] == "throughput"]  # each of some seconds
    for what in ("generation_tokens_per_s", "prompt_tokens_per_s"):
        assert max(line[what] for line in work) > 0
