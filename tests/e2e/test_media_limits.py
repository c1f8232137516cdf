"""--limit-mm-per-prompt bounds images and videos, each by its own number, through both APIs; and whose code runs."""

import asyncio
from typing import Any

import httpx
import pytest

from shared.errors import InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import animation, data_url, png
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

PICTURE = png(size=(60, 40))
VIDEO = animation([png(number, (60, 40)) for number in range(4)], 500)
CASES = [((2, 1), ""), ((3, 1), "IMAGES"), ((2, 2), "VIDEOS"), ((0, 2), "VIDEOS"), ((2, 0), "")]


def test_each_modality_has_its_limit(tmp_path: Any) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen2_vl")
    with System(folder, "--limit-mm-per-prompt", "image=2,video=1") as system:
        (card,) = httpx.get(f"{system.base_url}/models").json()["data"]
        native = {"code": "native", "off": []}
        assert card["parts"] == dict.fromkeys(("prompt", "encoder", "decoder"), native)
        for (images, videos), refused in CASES:
            answer = ask_rest(system, images, videos)
            reason, field = asyncio.run(ask_grpc(system, images, videos))
            if not refused:
                assert answer.status_code == 200, answer.text
                assert reason == ""
                continue
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["code"].upper() == reason == f"TOO_MANY_{refused}"
            # The first item that is one too many: images come first.
            last = images - 1 if refused == "IMAGES" else images + 1
            assert error["param"].startswith(f"messages[0].content[{last}]")
            assert field.startswith(f"messages[0].content[{last}]")


def ask_rest(system: System, images: int, videos: int) -> httpx.Response:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(PICTURE)}}]
    parts *= images
    parts += [{"type": "video_url", "video_url": {"url": data_url(VIDEO)}}] * videos
    parts.append({"type": "text", "text": "the red circle"})
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    return httpx.post(f"{system.base_url}/chat/completions", json=body, timeout=120)


async def ask_grpc(system: System, images: int, videos: int) -> tuple[str, str]:
    """The reason and the field of the refusal; empty where there is none."""
    parts = [ContentPart(image=PICTURE)] * images + [ContentPart(video=VIDEO)] * videos
    message = ChatMessage(role="user", content=[*parts, ContentPart(text="the red circle")])
    options = GenerationOptions(max_tokens=2)
    async with open_channel(system.grpc_address, 64 << 20) as channel:
        try:
            with calling("gateway"):
                request = ChatRequest(messages=[message], options=options)
                async for _ in ChatServiceStub(channel).Chat(request, timeout=120):
                    pass
        except InvalidRequest as error:
            return error.reason, error.metadata["field"]
    return "", ""
