"""Containers whose folder for artifacts has 64 MiB. Needs a Docker daemon: `pytest -m compose`."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import data_url, png
from tests.support.processes.compose import Stack

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

SIDE = 40 * 28  # pixels; 3.7 MiB of pixel values
COUNT = 36  # twice as many as there is room for


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        model = make_checkpoint(
            Path(folder),
            "qwen2_vl",
            text={"hidden_size": 64, "max_position_embeddings": 16_384},
            images={"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 12_000}},
        )
        for path in (model, *model.iterdir()):  # the containers have a user of their own
            path.chmod(0o755)
        with Stack(
            "tessera-small",
            "small",
            MODEL=str(model),
            SERVED_MODEL_NAME="small",
            ARTIFACT_BYTES="64m",
        ) as stack:
            yield stack


async def ask(client: openai.AsyncOpenAI, number: int) -> int:
    """Tokens of the answer to a question about a picture of its own."""
    picture = {"type": "image_url", "image_url": {"url": data_url(png(number, (SIDE, SIDE)))}}
    answer = await client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": [picture]}],  # type: ignore[misc, list-item]
        max_tokens=2,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def test_every_picture_is_answered(stack: Stack) -> None:
    stack.up(vision_encoder=2)
    warnings = stack.compose("logs", "--no-color", "preprocess", "vision-encoder")
    assert "shared memory is too small for the cache" in warnings
    async with openai.AsyncOpenAI(
        base_url=stack.base_url, api_key="none", timeout=300, max_retries=0
    ) as client:
        for number in range(COUNT):
            assert await ask(client, number) == 2
        together = await asyncio.gather(*(ask(client, 1000 + n) for n in range(COUNT)))
        assert together == [2] * COUNT
