"""With little shared memory every picture is answered, one after the other and many at once; one that could never have
room is a 413.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import data_url, png
from tests.support.processes.small_shared_memory import with_shared_memory
from tests.support.processes.system import System

pytestmark = pytest.mark.timeout(600)

ROW_PIXELS = 28 * 28
ROW_BYTES = ROW_PIXELS * 3 + 64 * 4  # pixels as bytes, and float32 embeddings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pictures have as many pixel values as pixels."""
    return make_checkpoint(
        tmp_path_factory.mktemp("qwen2_vl"),
        "qwen2_vl",
        text={"hidden_size": 64, "max_position_embeddings": 16_384},
        images={"size": {"shortest_edge": 56 * 56, "longest_edge": ROW_PIXELS * 12_000}},
    )


@pytest.fixture(params=["8m", pytest.param("64m", marks=pytest.mark.full)])
def system(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[System]:
    program = with_shared_memory(request.param, (sys.executable, "-m", "services.launcher"))
    with System(checkpoint, program=program) as running:
        running.shared_memory = int(request.param[:-1]) << 20  # type: ignore[attr-defined]
        yield running


async def ask(client: httpx.AsyncClient, number: int, rows: int) -> httpx.Response:
    """The answer to a question about a picture of so many columns and rows of 28 pixels."""
    picture = {"url": data_url(png(number, (28 * rows, 28 * rows)))}
    parts = [
        {"type": "image_url", "image_url": picture},
        {"type": "text", "text": "the red circle"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    return await client.post("/chat/completions", json=body)


async def test_every_picture_is_answered(system: System) -> None:
    total: int = system.shared_memory  # type: ignore[attr-defined]
    assert "shared memory is too small for the cache" in system.log
    side = 20 if total < 32 << 20 else 40
    count = 2 * total // (side * side * ROW_BYTES)  # twice as many as there is room for
    async with httpx.AsyncClient(base_url=system.base_url, timeout=300) as client:
        for number in range(count):
            answer = await ask(client, number, side)
            assert answer.status_code == 200, (number, answer.text)
        together = await asyncio.gather(*(ask(client, 1000 + n, side) for n in range(count)))
        assert [answer.status_code for answer in together] == [200] * count, [
            answer.text for answer in together if answer.status_code != 200
        ]
        again = await ask(client, 0, side)
        assert again.status_code == 200

        if total < 32 << 20:
            for rows in (62, 58):  # pixel values alone, and together with embeddings
                assert rows * rows * ROW_BYTES > total
                refused = await ask(client, 2000, rows)
                check_refusal(refused, total)
            assert (await ask(client, 2001, side)).status_code == 200


def check_refusal(answer: httpx.Response, total: int) -> None:
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == 413, answer.text
    assert error["code"] == "media_over_shared_memory"
    assert str(total) in error["message"]
